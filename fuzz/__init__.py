"""Fuzzing by hand: structure-aware mutations of tiny checkpoints, and what must hold for every one of them."""
