"""Special token ids: every file that may name a stop id is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import builder
from builder.checkpoint import Checkpoint
from builder.errors import Refused
from builder.tokens import TokenIds, read_token_ids
from fixtures.writer import Tiny
from tests.builder.test_package import LAYOUTS, PAPERS
from tests.conftest import TinyFactory

VOCAB = 96
TEXT_FILES = {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
}
TOKENIZER = {"added_tokens": [{"id": 80, "content": "<|im_end|>"}, {"id": 81, "content": "<|endoftext|>"}]}


def add(folder: Path, **files: object) -> Path:
    """Writes JSON files beside the weights."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def tokens(folder: Path) -> TokenIds:
    return read_token_ids(Checkpoint(folder), VOCAB)


@pytest.mark.parametrize(
    ("generation", "outer", "inner", "tokenizer_eos", "expected"),
    [
        ([70, 71], 71, None, None, (70, 71)),
        (70, 71, None, "<|im_end|>", (70, 71, 80)),
        (None, 71, 72, "<|endoftext|>", (71, 72, 81)),
        (None, None, [72, 73], {"content": "<|im_end|>"}, (72, 73, 80)),
        ([80, 70], [70, 80], 71, "<|im_end|>", (80, 70, 71)),
        (None, None, None, "<|im_end|>", (80,)),
        (None, None, None, "<|unknown|>", ()),
        (None, None, None, None, ()),
        ([0], None, None, None, (0,)),
    ],
)
def test_stop_ids_are_the_ordered_union(
    tiny: TinyFactory,
    generation: object,
    outer: object,
    inner: object,
    tokenizer_eos: object,
    expected: tuple[int, ...],
) -> None:
    """generation_config.json, then config.json (outer, then text_config), then the tokenizer's own."""

    def edit(tensors: object, config: dict[str, dict[str, object]]) -> None:
        config["eos_token_id"] = outer  # type: ignore[assignment]
        config["text_config"]["eos_token_id"] = inner

    folder = tiny("modelopt", Tiny(vision=True), edit)
    if generation is not None:
        add(folder, generation_config={"eos_token_id": generation})
    add(folder, tokenizer=TOKENIZER, tokenizer_config={"eos_token": tokenizer_eos})
    assert tokens(folder).eos == expected


def test_bos_and_pad_come_from_the_first_file_that_has_them(tiny: TinyFactory) -> None:
    folder = tiny("modelopt", edit=lambda tensors, config: config.update(bos_token_id=5, pad_token_id=None))
    assert tokens(folder) == TokenIds((89,), 5, None)
    add(folder, generation_config={"bos_token_id": 6, "pad_token_id": 0})
    assert tokens(folder) == TokenIds((89,), 6, 0)


def test_absent_ids_are_absent(tiny: TinyFactory) -> None:
    folder = tiny("modelopt", edit=lambda tensors, config: config.pop("eos_token_id"))
    assert tokens(folder) == TokenIds((), None, None)


@pytest.mark.parametrize("value", [96, -1, 1.0, "89", True, [89, 96], [[89]]])
@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id", "pad_token_id"])
def test_an_id_outside_the_vocabulary_is_refused(tiny: TinyFactory, key: str, value: object) -> None:
    folder = add(tiny("modelopt"), generation_config={key: value})
    with pytest.raises(
        Refused, match=rf"^generation_config\.json {key}: expected token ids below the vocabulary of 96"
    ):
        builder.export(folder, folder.parent / "out")
    assert not (folder.parent / "out").exists()


def test_a_tokenizer_id_outside_the_vocabulary_is_refused(tiny: TinyFactory) -> None:
    added = {"added_tokens": [{"id": 96, "content": "<e>"}]}
    folder = add(tiny("modelopt"), tokenizer=added, tokenizer_config={"eos_token": "<e>"})
    with pytest.raises(Refused, match=r"tokenizer\.json eos_token"):
        tokens(folder)


def test_text_files_are_copied_verbatim_and_nothing_else_is(tiny: TinyFactory, tmp_path: Path) -> None:
    """By an allow-list: a folder may hold pickles, code and caches."""
    folder = tiny("modelopt")
    for name in TEXT_FILES:
        (folder / name).write_bytes(b"{ }\r\n")  # bytes that any rewriting would change
    (folder / "chat_template.jinja").write_bytes("{{ 'ä' }}\r\n\0".encode())
    for name in ("pytorch_model.bin", "modeling_x.py", "README.md", ".env", "tokenizer.json.bak"):
        (folder / name).write_bytes(b"x")
    for ours, options in LAYOUTS.items():
        out = tmp_path / ours
        builder.export(folder, out, options)
        made = {"model.onnx", "mtp.onnx", "genai_config.json", ours, "overlays", *PAPERS}
        shards = {"model.safetensors"} if ours == "transformed.data" else set()
        assert {path.name for path in out.iterdir()} == made | shards | TEXT_FILES
        assert {path.name for path in (out / "overlays").iterdir()} == {"latency.json", "plain.json"}
        for name in TEXT_FILES:
            assert (out / name).read_bytes() == (folder / name).read_bytes()
        assert (out / "README.md").read_bytes() != b"x"  # ours, not the checkpoint's


def test_a_tokenizer_without_an_eos_token_names_no_stop_id(tiny: TinyFactory) -> None:
    """An added token without content is not what an absent eos_token means."""
    folder = tiny("modelopt")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"id": 7}]}')
    assert 7 not in read_token_ids(Checkpoint(folder), 96).eos
