"""manifest.json: what a package is made of, from which bytes, and what it needs to run.

Everything in it follows from the source, the options and the versions, so that two exports are equal to the byte.
What belongs to one run (when, where, by which kind of link) is in build.json, with the digest of the manifest itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from builder import contract
from builder.checkpoint import read_json_object
from builder.errors import Refused

MANIFEST_FILE, BUILD_FILE = "manifest.json", "build.json"
FORMAT = "draftsmith package"
VERSION = 1
"""Of the manifest's own layout."""
CONTRACT_VERSION = 1
"""Of the graphs' inputs, outputs and their meaning: a runtime refuses one it does not know."""


def encode(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class File(_Strict):
    """As FileRecord."""

    size: int = Field(ge=0)
    digest: str | None
    header: str | None


class Origin(_Strict):
    """Bytes of the checkpoint: a tensor of a shard, by offset and length."""

    shard: str
    tensor: str
    offset: int = Field(ge=0)
    length: int = Field(ge=0)


class Initializer(_Strict):
    """Where an initializer's bytes lie in the package, and what they were made of."""

    file: str
    offset: int = Field(ge=0)
    length: int = Field(ge=0)
    dtype: str
    shape: list[int]
    transform: str | None
    origin: list[Origin]


class Op(_Strict):
    domain: str
    op: str
    attributes: list[str]


class GraphRecord(_Strict):
    digest: str
    opsets: dict[str, int]
    minimum_onnxruntime: str
    required_ops: list[Op]


class StateGroup(_Strict):
    """States that a verify step shows after each of checkpoint_count tokens, in the words of the first design of such
    outputs; %d in a name is the layer. "left": slot j holds the state after local token j; "right": the last slot holds
    the state after the last captured token.
    """

    kind: Literal["fixed"]
    layer_ids: list[int]
    bindings: dict[str, dict[str, str]]
    checkpoint_count: int
    checkpoint_alignment: Literal["left", "right"]


def state_groups(layers: Sequence[int], count: int) -> list[dict[str, Any]]:
    """What the manifest says of these layers' states; nothing without checkpoints."""
    kinds = (
        (contract.PAST_CONV, contract.PRESENT_CONV, contract.CONV_CHECKPOINTS, "left"),
        (contract.PAST_RECURRENT, contract.PRESENT_RECURRENT, contract.RECURRENT_CHECKPOINTS, "right"),
    )
    return [
        {
            "kind": "fixed",
            "layer_ids": list(layers),
            "bindings": {
                "state": {
                    "input": past.replace("{}", "%d"),
                    "output": present.replace("{}", "%d"),
                    "checkpoints": checkpoints.replace("{}", "%d"),
                }
            },
            "checkpoint_count": count,
            "checkpoint_alignment": alignment,
        }
        for past, present, checkpoints, alignment in kinds
        if count and layers
    ]


class Manifest(_Strict):
    """A manifest.json of this version."""

    producer: dict[str, str]
    source: dict[str, Any]
    options: dict[str, Any]
    census: dict[str, Any]
    files: dict[str, File]
    graphs: dict[str, GraphRecord]
    initializers: dict[str, dict[str, Initializer]]
    state_groups: list[StateGroup] = Field(default_factory=list)


def read(folder: Path) -> Manifest | None:
    """None where the package has no manifest. Raises Refused for one that is damaged or of another version."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return None
    found = read_json_object(path)
    known = {"format": FORMAT, "version": VERSION, "contract_version": CONTRACT_VERSION}
    for key, expected in known.items():
        if found.get(key) != expected or isinstance(found[key], bool | float):  # true and 1.0 equal 1
            raise Refused(
                f"{path} {key}",
                expected=expected,
                found=found.get(key),
                remedy="export the package again, or use the version of draftsmith that made it",
            )
    try:
        return Manifest.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise Refused(
            f"{path} {'.'.join(map(str, first['loc']))}",
            expected=first["msg"],
            found=repr(first["input"]),
            remedy="export the package again",
        ) from None
