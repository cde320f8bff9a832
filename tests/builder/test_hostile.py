"""Hostile checkpoints: whatever is in the folder, a success or a refusal, soon, and nothing foreign touched.

fuzz/ holds the mutations and what is checked of each; this is a short walk through them, the proof that the checks
can fail, and what longer walks found.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import runpy
import struct
import subprocess
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import builder
from builder import checkpoint
from builder.checkpoint import INDEX_NAME, Checkpoint, read_header
from builder.config import parse_config
from builder.errors import Refused
from fixtures import writer
from fixtures.writer import CONFIG
from fuzz import mutations
from fuzz.mutations.odd_values import PATTERNS
from fuzz.target import Finding, Target, TooLong, check_text, signature
from tests.conftest import TinyFactory


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Memory is left to the longer runs: this process holds whatever other tests left in it."""
    return Target(tmp_path_factory.mktemp("hostile"), exports=5, memory=None)


def seeded(*parts: object) -> bytes:
    return random.Random(":".join(map(str, parts))).randbytes(256)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.binary(min_size=24, max_size=96))
def test_a_damaged_checkpoint_is_exported_or_refused(target: Target, data: bytes) -> None:
    """run() raises for whatever else happens."""
    before = Counter(target.counts)
    target.run(data)
    ended = Counter(target.counts) - before
    assert ended["executions"] == ended["succeeded"] + ended["refused"] == 1


def test_many_inputs_get_past_the_header_parser(target: Target) -> None:
    """Else the rest of the builder would hardly be tested. Executions add up: each is a success or a refusal."""
    before = Counter(target.counts)
    for number in range(150):
        target.run(seeded("depth", number))
    counts = target.counts - before
    assert counts["executions"] == counts["succeeded"] + counts["refused"] == 150
    assert counts["past the header parser"] >= 0.5 * 150
    assert counts["exported"] >= 5 and counts["planned"] and counts["inspected"]


def test_every_mutation_takes_place_and_the_same_bytes_give_the_same_folder(tmp_path: Path) -> None:
    done: Counter[str] = Counter()
    for number in range(2000):
        done.update(mutations.mutated(seeded("mutations", number))[0].done)
    assert set(done) == {mutation.__name__ for mutation in (*mutations.LOUD, *mutations.QUIET)}
    for number in range(20):
        for name in "ab":
            mutations.write(mutations.mutated(seeded(number))[0], tmp_path / name / "checkpoint")
        assert contents(tmp_path / "a") == contents(tmp_path / "b")


def contents(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def test_the_checkpoints_it_starts_from_are_whole(target: Target) -> None:
    before = target.counts["succeeded"]
    for number in range(len(mutations.BASES)):
        target.run(bytes([number]))  # no bytes are left to choose a mutation by
    assert target.counts["succeeded"] == before + len(mutations.BASES)


# The checks can fail


def unpickle() -> None:
    pickle.loads(pickle.dumps(Path("x")))


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a file outside": lambda folder: (folder.parent / "secret.json").read_text(),
    "a file outside, by ..": lambda folder: (folder / ".." / "secret.json").read_text(),
    "a pickle": lambda folder: (folder / "pytorch_model.bin").read_bytes(),
    "code": lambda folder: (folder / f"modeling_{mutations.TRAP}.py").read_bytes(),
    "running code": lambda folder: runpy.run_path(str(folder / f"modeling_{mutations.TRAP}.py")),
    "a file of the checkpoint, to write": lambda folder: (folder / "config.json").open("a").close(),
    "an import": lambda folder: __import__(f"modeling_{mutations.TRAP}"),
    "unpickling": lambda folder: unpickle(),
    "a process": lambda folder: subprocess.run(["true"], check=True),
}


@pytest.mark.parametrize("access", FOREIGN)
def test_foreign_access_would_be_found(target: Target, access: str) -> None:
    folder = target.home / "checkpoint"
    mutations.write(mutations.base(0), folder)
    with (
        pytest.raises(Finding, match="foreign access"),
        target.watch.over(folder, target.home / "written"),
        contextlib.suppress(SystemExit, ModuleNotFoundError),
    ):
        FOREIGN[access](folder)


def test_faults_would_be_found(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback, a hang, a leftover and a line that is none each end a run."""

    def behave(fault: Callable[[Path], object]) -> BaseException | None:
        monkeypatch.setattr("builder.source.read_source", lambda checkpoint, mtp: fault(checkpoint.folder))
        for number in range(100):  # until one is not inspected either, by lot
            data = bytes([0, 0, number])
            if zlib.crc32(data) % target.exports == 0:
                continue  # an export, which the short alarm below could interrupt
            try:
                target.run(data)
            except BaseException as error:
                return error
        return None

    def leave(folder: Path) -> None:
        (folder.parent / "written" / "x").mkdir(parents=True)
        raise Refused("x", expected="y", found="z", remedy="w")

    def say(folder: Path) -> Any:
        return type("Source", (), {"warnings": ["two\nlines"]})

    assert isinstance(behave(lambda folder: dict[str, int]()["key"]), KeyError)
    assert str(behave(leave)) == "leftovers: written"
    assert str(behave(say)) == "text that is no line: 'two\\nlines'"
    monkeypatch.setattr(target, "seconds", 0.2)
    for hang in (lambda folder: time.sleep(10), lambda folder: all(iter(lambda: True, False))):
        error = behave(hang)
        assert isinstance(error, TooLong), error


# Found by fuzzing, or by looking where a fuzzer cannot go


def bare(folder: Path, header: bytes = b"{}", config: bytes = b"{}", index: bytes | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (folder / "config.json").write_bytes(config)
    if index is not None:
        (folder / INDEX_NAME).write_bytes(index)
    return folder


@pytest.mark.parametrize("part", ["header", "config", "index"])
@pytest.mark.parametrize("unit", [b"[],", b'{"a":{}},', b"1,"])
def test_json_that_would_fill_the_memory_is_refused_before_it_is_parsed(tmp_path: Path, part: str, unit: bytes) -> None:
    """Were 2.3 GB and 18 seconds from a header of 90 MB; within the limits, the worst tried took 600 MB."""
    content = b'{"a":[' + unit * (3 * checkpoint.MAX_JSON_VALUES // 2) + b"0]}"
    with pytest.raises(Refused, match=f"more than {checkpoint.MAX_JSON_VALUES} values"):
        Checkpoint(bare(tmp_path, **{part: content}))


def test_a_header_or_file_of_too_many_bytes_is_refused_unread(tmp_path: Path) -> None:
    folder = bare(tmp_path)
    for name in ("model.safetensors", "config.json"):
        with (folder / name).open("r+b") as file:
            file.write(struct.pack("<Q", checkpoint.MAX_JSON_BYTES + 1))
            file.truncate(checkpoint.MAX_JSON_BYTES + 100)  # sparse
    with pytest.raises(Refused, match=r"config\.json: expected at most"):
        Checkpoint(folder)
    with pytest.raises(Refused, match="a safetensors header"):
        read_header(folder / "model.safetensors")


@pytest.mark.parametrize("depth", [65, 400, 900, 950, 975, 990, 5000])
@pytest.mark.parametrize("key", ["eos_token_id", "hidden_size", "quantization_config", "rope_parameters"])
def test_json_that_is_nested_too_deep_is_refused(tiny: TinyFactory, depth: int, key: str) -> None:
    """A precaution: no traceback was seen without the limit, only other refusals, further down."""
    folder = tiny()
    deep = b"[" * (depth - 1) + b"]" * (depth - 1)
    text = json.dumps({**json.loads((folder / "config.json").read_bytes()), key: "deep"}).encode()
    (folder / "config.json").write_bytes(text.replace(b'"deep"', deep))
    with pytest.raises(Refused, match=r"config\.json: expected JSON in UTF-8") as caught:
        builder.inspect(folder)
    check_text(str(caught.value))


def test_json_may_be_nested_as_deep_as_the_limit(tmp_path: Path) -> None:
    deep = checkpoint.MAX_JSON_DEPTH - 1
    assert Checkpoint(bare(tmp_path, config=b'{"a":' + b"[" * deep + b"]" * deep + b"}")).config["a"]


@pytest.mark.parametrize("size", [1, (1 << 63) - 1])
@pytest.mark.parametrize("rank", [17, 65, 300, 200_000])
def test_a_shape_of_many_dimensions_is_refused(tmp_path: Path, rank: int, size: int) -> None:
    """numpy takes 64; a product of 300 has more digits than Python prints, one of 200,000 ran for minutes."""
    entry = {"dtype": "U8", "shape": [size] * rank, "data_offsets": [0, 0]}
    with pytest.raises(Refused, match="tensor a: expected a shape of up to 16"):
        Checkpoint(bare(tmp_path, json.dumps({"a": entry}).encode()))


def test_shards_with_too_many_tensors_in_all_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each header has its limit, but an index may name any number of shards."""
    monkeypatch.setattr(checkpoint, "MAX_TENSORS", 5)
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    weight_map = {f"{shard}.0": f"{shard}.safetensors" for shard in "ab"}
    folder = bare(tmp_path, index=json.dumps({"weight_map": weight_map}).encode())
    for shard in "ab":
        header = json.dumps({f"{shard}.{i}": entry for i in range(3)}).encode()
        (folder / f"{shard}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(Refused, match="at most 5 tensors, found 6"):
        Checkpoint(folder)


def test_a_shard_name_that_no_disk_takes_is_refused(tmp_path: Path) -> None:
    """The system's "File name too long" is not the machine's fault."""
    index = json.dumps({"weight_map": {"x": "x" * 300 + ".safetensors"}}).encode()
    with pytest.raises(Refused, match="expected a plain"):
        Checkpoint(bare(tmp_path, index=index))


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "\0", "\u202e", "\udc80"], ids=ascii)
def test_a_name_that_a_terminal_would_obey_is_refused(tmp_path: Path, name: str) -> None:
    """Warnings repeat names of tensors."""
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    with pytest.raises(Refused, match=r"model\.safetensors") as caught:
        Checkpoint(bare(tmp_path, json.dumps({name: entry}).encode()))
    check_text(str(caught.value))


ROPE = CONFIG["rope_parameters"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rope_parameters": {**ROPE, "mrope_section": [5, -2, 1]}}, "rope.mrope_section.1: "),
        ({"rope_parameters": {**ROPE, "partial_rotary_factor": 1e-9, "mrope_section": [0, 0, 0]}}, "mrope_section: "),
        ({"rope_parameters": {**ROPE, "rope_theta": 1e308}}, "rope.theta: "),
        ({"rms_norm_eps": 1e-320}, "rms_norm_eps: "),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps: "),
        ({"max_position_embeddings": 1 << 24}, "max_position_embeddings: expected at most 8388608"),
    ],
)
def test_numbers_that_a_graph_cannot_hold_are_refused(change: dict[str, Any], expected: str) -> None:
    """Each passed before: sections may sum to the right width, and float32 ends sooner than float64."""
    with pytest.raises(Refused) as caught:
        parse_config({**CONFIG, **change})
    assert f"config.json {expected}" in str(caught.value)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: ascii(pattern)[:30])
def test_any_pattern_is_matched_or_refused(target: Target, tmp_path: Path, pattern: str) -> None:
    """Catastrophic ones, ones the compiler overflows on, and ones that are no pattern."""

    def edit(tensors: writer.Tensors, config: writer.Config) -> None:
        config["quantization_config"]["ignore"] = [pattern]

    folder = writer.write(tmp_path / "checkpoint", "compressed-tensors", edit=edit)
    started = time.process_time()
    try:
        builder.inspect(folder)
    except Refused as refusal:
        check_text(str(refusal))
    assert time.process_time() - started < 5


def test_a_finding_is_named_after_where_it_happened() -> None:
    try:
        parse_config(None)  # type: ignore[arg-type]
    except AttributeError as error:
        assert signature(error) == "AttributeError in config.py parse_config"
