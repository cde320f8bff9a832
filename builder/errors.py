"""What can go wrong, each with the exit code the command line gives it."""

MAX_PART = 300
"""Characters of an input that an error repeats."""


def one_line(part: object) -> str:
    """Text that came from outside, fit for one line of a terminal: clipped, control characters spelled out."""
    text = str(part)
    return printable(text if len(text) <= MAX_PART else f"{text[:MAX_PART]}...")


def printable(text: str) -> str:
    """The whole text with line breaks, control characters and everything else that nobody can see spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


class DraftsmithError(Exception):
    """Base of every error this project raises on purpose; its text is one line for a person."""

    exit_code = 1


class Refused(DraftsmithError):
    """The input or the usage cannot be served (exit 2). Nothing has been written.

    subject: the tensor, file or key; expected, found: the two sides; remedy: what to do, an imperative sentence.
    """

    exit_code = 2

    def __init__(self, subject: object, *, expected: object, found: object, remedy: str) -> None:
        self.subject, self.expected, self.found, self.remedy = subject, expected, found, remedy
        super().__init__(f"{one_line(subject)}: expected {one_line(expected)}, found {one_line(found)}; {remedy}")

    def within(self, place: str) -> "Refused":
        """The same refusal, saying where in a longer input its subject stood."""
        return Refused(f"{place} {self.subject}", expected=self.expected, found=self.found, remedy=self.remedy)


class MachineError(DraftsmithError):
    """The machine failed us: no space, no kernel, no permission (exit 3)."""

    exit_code = 3
