"""Measurements, as ratios within one run. Not tests: a slow machine is not a fault."""
