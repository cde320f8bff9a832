"""dump(): everything a package says about one prompt, gathered from the engine's own runs.

The graphs are driven by the ordinary engine, chunked prompt, priming and chain included, so a fault in the loop shows
in the arrays. Keys and layouts are those of the reference files (docs of `build-model run --dump`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builder.errors import MachineError, Refused
from builder.reader import Package
from runtime.engine import Engine
from runtime.generation import Ask
from runtime.limits import EngineOptions
from runtime.loading import LoadedPackage
from runtime.packing import Array, Segment
from runtime.sampling import GREEDY, SamplingOptions, greedy


@dataclass(frozen=True)
class Row:
    """One packed row of a run: its position and what the graph made of it."""

    position: int
    logits: NDArray[np.float32]
    hidden: NDArray[np.float32]


def rows_of(segment: Segment, outputs: tuple[Array, Array]) -> list[Row]:
    """Copies of a one-request run's rows in float32, since a run's arrays are used again."""
    logits, hidden = outputs
    return [
        Row(segment.past_length + i, logits[i].astype(np.float32), hidden[i].astype(np.float32))
        for i in range(len(segment.token_ids))
    ]


def dump(
    package: LoadedPackage,
    token_ids: Sequence[int],
    draft_tokens: int,
    options: EngineOptions,
    sampling: SamplingOptions = GREEDY,
) -> dict[str, NDArray[Any]]:
    """logits [T, vocab] and hidden_states [T, hidden] of the prompt; with a head mtp_logits [T, vocab] (row p saw
    token p + 1, the last one the first generated token), and for draft_tokens K mtp_draft_tokens [K] and
    mtp_draft_logits [K, vocab] of the first chain. All float32.
    """
    with_head = package.package.mtp is not None and package.package.max_draft_tokens > 0
    engine = Engine(
        package, replace(options, proposer="mtp", max_draft_tokens=max(1, draft_tokens) if with_head else 0)
    )
    target_rows: list[Row] = []
    head_rows: list[Row] = []
    engine.target.on_run = lambda segments, outputs: target_rows.extend(rows_of(segments[0], outputs))
    if engine.proposer:
        engine.proposer.head.on_run = lambda segments, outputs: head_rows.extend(rows_of(segments[0], outputs))
    engine.submit(token_ids, draft_tokens + 2, min(draft_tokens, engine.max_draft_tokens), (), sampling)
    length = len(token_ids)
    while engine.has_work and len(target_rows) <= length:
        engine.step()
    result = {
        "logits": np.stack([row.logits for row in target_rows[:length]]),
        "hidden_states": np.stack([row.hidden for row in target_rows[:length]]),
    }
    if engine.proposer:
        result |= _head_arrays(head_rows, length, draft_tokens)
    return result


def check_target(path: Path, package: Package, asks: Sequence[Ask]) -> None:
    """Raises Refused where write() could not make the dump: nothing but a plain file is ever replaced."""
    if len(asks) != 1:
        raise Refused("--dump", expected="one request", found=len(asks), remedy="dump one prompt at a time")
    try:
        replaceable = not path.exists() or path.is_file()
    except OSError as error:
        raise Refused("--dump", expected="a usable path", found=error.strerror, remedy="choose another name") from None
    if not path.name or path.is_symlink() or not replaceable:
        raise Refused("--dump", expected="the name of a file", found=path, remedy="choose another name")
    if not path.parent.is_dir():
        raise Refused("--dump", expected="a file in a folder that exists", found=path, remedy="make the folder first")
    room = package.context_length - len(asks[0].token_ids)
    if room < asks[0].draft_tokens + 2:
        raise Refused(
            "--dump",
            expected=f"room for {asks[0].draft_tokens + 2} tokens behind the prompt",
            found=room,
            remedy="shorten the prompt",
        )


def write(path: Path, package: LoadedPackage, asks: Sequence[Ask], options: EngineOptions) -> None:
    """Writes dump() of the one request asked for as an .npz file. Raises Refused, or MachineError on I/O."""
    check_target(path, package.package, asks)
    arrays = dump(package, asks[0].token_ids, asks[0].draft_tokens, options, asks[0].sampling)
    partial = path.with_name(f".partial-{os.getpid()}-dump")
    try:
        with partial.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        partial.replace(path)
    except OSError as error:
        raise MachineError(f"{path}: {error.strerror or error}; nothing was dumped") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _head_arrays(rows: list[Row], length: int, draft_tokens: int) -> dict[str, NDArray[Any]]:
    if [row.position for row in rows[:length]] != list(range(length)):
        raise AssertionError("the MTP head was not fed every row of the prompt")
    result: dict[str, NDArray[Any]] = {"mtp_logits": np.stack([row.logits for row in rows[:length]])}
    chain = [row.logits for row in rows[length - 1 : length - 1 + draft_tokens]]
    if draft_tokens:
        logits = np.stack(chain)
        result["mtp_draft_logits"] = logits
        result["mtp_draft_tokens"] = np.array(greedy(logits), np.int64)
    return result
