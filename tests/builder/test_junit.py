"""JUnit XML: read back by a parser, whatever stands in the checks."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from builder import junit
from builder.checks import Check
from builder.errors import MachineError


def written(path: Path, *checks: Check, suite: str = "package") -> ElementTree.Element:
    junit.write(path / "v.xml", suite, checks)
    return ElementTree.parse(path / "v.xml").getroot()[0]


def test_the_whole_detail_is_written(tmp_path: Path) -> None:
    """What was found and what to do stand at the end of the line."""
    detail = f"{'long ' * 200}; export the package again"
    passed, failure = written(tmp_path, Check("a", True, detail), Check("b", False, detail))
    assert passed.findtext("system-out") == detail
    inner = failure.find("failure")
    assert inner is not None and inner.attrib["message"] == inner.text == detail


def test_nothing_that_xml_forbids_is_written(tmp_path: Path) -> None:
    """Control characters and surrogates of names and values are spelled out, so that a parser reads the rest."""
    odd = "".join(map(chr, (*range(0x20), 0x7F, 0x85, 0xD800, 0xDFFF, 0xFFFE, 0xFFFF, 0x1FFFE)))
    suite = written(tmp_path, Check(f"n{odd}", False, f"<&>\"' {odd} \u00e9 end"), suite=f"s{odd}")
    case = suite[0]
    message = case[0].attrib["message"]
    assert message == case[0].text and message.startswith("<&>\"' \\x00\\x01") and message.endswith("\u00e9 end")
    assert (
        r"\ud800\udfff\ufffe\uffff" in message
        and r"\ud800" in case.attrib["name"]
        and r"\ud800" in suite.attrib["name"]
    )


def test_a_report_that_cannot_be_written_is_the_machines_fault(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="could not be written"):
        junit.write(tmp_path / "no" / "v.xml", "package", [])
