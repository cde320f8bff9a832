"""What can go wrong, each with the exit code the command line gives it."""


class DraftsmithError(Exception):
    """Base of every error this project raises on purpose; its text is one line for a person."""

    exit_code = 1


class Refused(DraftsmithError):
    """The input or the usage cannot be served (exit 2). Nothing has been written.

    subject: the tensor, file or key; expected, found: the two sides; remedy: what to do, an imperative sentence.
    """

    exit_code = 2

    def __init__(self, subject: object, *, expected: object, found: object, remedy: str) -> None:
        super().__init__(f"{subject}: expected {expected}, found {found}; {remedy}")


class MachineError(DraftsmithError):
    """The machine failed us: no space, no kernel, no permission (exit 3)."""

    exit_code = 3
