"""Checks as JUnit XML, the form that continuous-integration services read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from builder.checks import Check
from builder.errors import MachineError, printable


def write(path: Path, suite: str, checks: Sequence[Check]) -> None:
    """One test case a check. Raises MachineError where the file cannot be written.

    What printable() leaves is also what XML 1.0 allows: control characters and surrogates are neither.
    """
    suite = printable(suite)
    failures = sum(not check.ok for check in checks)
    attributes = {"name": suite, "tests": str(len(checks)), "failures": str(failures), "errors": "0"}
    root = ElementTree.Element("testsuites", {**attributes, "name": "build-model verify"})
    inner = ElementTree.SubElement(root, "testsuite", attributes)
    for check in checks:
        case = ElementTree.SubElement(inner, "testcase", {"classname": suite, "name": printable(check.name)})
        detail = printable(check.detail)
        if check.ok:
            ElementTree.SubElement(case, "system-out").text = detail
        else:
            ElementTree.SubElement(case, "failure", {"message": detail}).text = detail
    ElementTree.indent(root)
    try:
        path.write_bytes(ElementTree.tostring(root, "utf-8", xml_declaration=True) + b"\n")
    except OSError as error:
        raise MachineError(f"{path}: {error.strerror or error}; the report could not be written") from error
