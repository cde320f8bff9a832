"""Progress: how long work tells a person how far it is, without knowing how that is shown."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is (bytes or tokens)."""


def silent(task: str, done: int, total: int) -> None:
    """Shows nothing."""
