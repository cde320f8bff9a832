"""A model whose every token depends on the order of all that it was fed and kept, in the shape of the real graphs.

FakeTarget and FakeHead stand in for Sessions: the same input and output names, caches updated in place through block
tables, states read and written as bound, updates captured as capsules. All values are small integers, exact in float32,
so whatever is committed wrongly once shows in every later token, and states can be compared to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from builder import contract
from builder.reader import GraphFile, Package
from runtime.loading import LoadedPackage
from runtime.place import HOST

Array = NDArray[Any]

VOCAB = 13
CAPACITY = 5
PRIME = 65521
LAYERS = ("linear_attention", "full_attention", "linear_attention")
SCALES = ((31, 7), (57, 3))
"""Multiplier and summand of the rolling hash in each of the two recurrent layers."""
PLACES = np.array([0, *((7919 * i * i + 104729 * i) % PRIME for i in range(1, 4096))])
"""What a token counts in the attention layer's sum at each position; the head has no row for position 0."""


@dataclass(frozen=True)
class Geometry:
    """Of the fake; contract.Geometry."""

    hidden_size: int = 5
    vocab_size: int = VOCAB
    num_key_value_heads: int = 1
    head_dim: int = 2
    linear_num_key_heads: int = 1
    linear_num_value_heads: int = 1
    linear_key_head_dim: int = 1
    linear_value_head_dim: int = 1
    linear_conv_kernel_dim: int = 3
    conv_channels: int = 2
    layer_types: tuple[str, ...] = LAYERS


@dataclass(frozen=True)
class State:
    """What the model knows after some tokens: two rolling hashes, the sum over all tokens, and the last two of them."""

    first: int = 0
    second: int = 0
    total: int = 0
    last: int = 0
    before: int = 0

    def fed(self, token: int, position: int) -> State:
        first, second = (
            (value * scale + token + summand) % PRIME
            for value, (scale, summand) in zip((self.first, self.second), SCALES, strict=True)
        )
        total = (self.total + (token + 1) * int(PLACES[position])) % PRIME
        return State(first, second, total, token + 1, self.last)

    @property
    def logits(self) -> Array:
        mixed = self.first * 3 + self.second * 5 + self.total * 7 + self.last * 11 + self.before * 13
        return ((mixed * (np.arange(VOCAB) + 17) * 7919) % 1009 / 300).astype(np.float32)

    @property
    def next_token(self) -> int:
        return int(self.logits.argmax())


def after(token_ids: Sequence[int]) -> State:
    state = State()
    for position, token in enumerate(token_ids):
        state = state.fed(token, position)
    return state


def plain(prompt: Sequence[int], count: int, stops: Sequence[int] = ()) -> list[int]:
    """What greedy decoding gives, computed from the tokens alone."""
    tokens: list[int] = []
    while len(tokens) < count and not (tokens and tokens[-1] in stops):
        tokens.append(after([*prompt, *tokens]).next_token)
    return tokens


@dataclass
class _Run:
    """What a bound run does; the arrays are the engine's."""

    session: FakeTarget | FakeHead
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]

    def run(self) -> None:
        for _ in range(self.session.repeats):
            self.session.compute(self.inputs, self.outputs)


@dataclass
class FakeTarget:
    """repeats: times that one call runs the model, as capturing a CUDA graph does."""

    repeats: int = 1
    place = HOST
    records = False

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], *, capture: bool = False) -> _Run:
        return _Run(self, inputs, outputs)

    def compute(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        lengths = np.diff(inputs[contract.CUMULATIVE_LENGTHS])
        captures = inputs[contract.CAPTURE_COUNT].copy()
        if not inputs[contract.CAPTURE_ACTIVE][0] or lengths.max() > CAPACITY:
            captures[:] = 0  # as a chunked kernel does for the whole batch when one row is long
        for name in outputs:
            if name.startswith(("state_update", "present_checkpoints")):
                outputs[name][:] = np.nan  # whatever is not captured must never be read
        for row in range(len(inputs[contract.PAST_LENGTHS])):
            self._row(row, int(captures[row]), inputs, outputs)

    def _row(self, row: int, captured: int, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        start, end = inputs[contract.CUMULATIVE_LENGTHS][row : row + 2].tolist()
        past = int(inputs[contract.PAST_LENGTHS][row])
        hashes = [int(inputs[contract.PAST_RECURRENT.format(layer)][row].item()) for layer in (0, 2)]
        convs = [inputs[contract.PAST_CONV.format(layer)][row].copy() for layer in (0, 2)]
        keys, blocks = inputs[contract.PAST_KEY.format(1)], inputs[contract.BLOCK_TABLE][row]
        for index in range(start, end):
            position, token = past + index - start, int(inputs[contract.INPUT_IDS][index])
            assert inputs[contract.POSITION_IDS][:, index].tolist() == [position] * 3
            _write(keys, blocks, position, (token + 1, position))
            held = State(hashes[0], hashes[1], 0, int(convs[0][0, -1]), int(convs[0][0, -2]))
            state = held.fed(token, position)
            total = _total(keys, blocks, position)
            state = State(state.first, state.second, total, state.last, state.before)
            for slot, value in enumerate((state.first, state.second)):
                if index - start < captured:
                    self._capture(outputs, row, slot, index - start, (value - hashes[slot], token))
                hashes[slot] = value
                convs[slot] = np.column_stack([convs[slot][:, 1:], _conv_row(token)])
                if index - start < captured and contract.CONV_CHECKPOINTS.format(0) in outputs:
                    series = [outputs[name] for name in contract.checkpoint_names([(0, 2)[slot]])]
                    series[0][row, index - start] = convs[slot]
                    series[1][row, CAPACITY - captured + index - start] = value
            outputs[contract.LOGITS][index] = state.logits
            outputs[contract.HIDDEN_STATES][index] = (state.first, state.second, total, state.last, state.before)
        for slot, layer in enumerate((0, 2)):
            outputs[contract.PRESENT_RECURRENT.format(layer)][row] = hashes[slot]
            outputs[contract.PRESENT_CONV.format(layer)][row] = convs[slot]

    @staticmethod
    def _capture(
        outputs: Mapping[str, Array], row: int, slot: int, index: int, delta_and_token: tuple[int, int]
    ) -> None:
        """Decay 1, key 1 and the difference: replaying them on anything but the right state gives another one."""
        layer = (0, 2)[slot]
        capsule = outputs[contract.RECURRENT_UPDATE.format(layer)][row]
        capsule[index], capsule[CAPACITY + index], capsule[2 * CAPACITY + index] = 1, 1, delta_and_token[0]
        outputs[contract.CONV_UPDATE.format(layer)][row, index] = _conv_row(delta_and_token[1])


@dataclass
class FakeHead:
    """Row p takes hidden p and token p + 1 and drafts token p + 2; one in `wrong_every` drafts is wrong (0: none).

    mismatches counts rows whose cache did not hold the tokens before them, which is what a head that lost step sees.
    """

    wrong_every: int = 3
    repeats: int = 1
    mismatches: int = 0
    place = HOST
    records = False

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], *, capture: bool = False) -> _Run:
        return _Run(self, inputs, outputs)

    def compute(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        bounds = inputs[contract.CUMULATIVE_LENGTHS].tolist()
        keys = inputs[contract.PAST_KEY.format(0)]
        for row, (start, end) in enumerate(pairwise(bounds)):
            past, blocks = int(inputs[contract.PAST_LENGTHS][row]), inputs[contract.BLOCK_TABLE][row]
            for index in range(start, end):
                position, token = past + index - start, int(inputs[contract.INPUT_IDS][index])
                assert inputs[contract.POSITION_IDS][:, index].tolist() == [position] * 3
                state = State(*inputs[contract.HIDDEN_STATES][index].astype(int).tolist()).fed(token, position + 1)
                _write(keys, blocks, position, (token + 1, position))
                self.mismatches += _total(keys, blocks, position, shift=1) != state.total
                logits = state.logits
                if self.wrong_every and state.first % self.wrong_every == 0:
                    logits = np.roll(logits, 1)
                outputs[contract.LOGITS][index] = logits
                outputs[contract.HEAD_HIDDEN_STATES][index] = (
                    *(state.first, state.second, state.total, state.last, state.before),
                )


def _conv_row(token: int) -> tuple[int, int]:
    return token + 1, 2 * token


def _write(keys: Array, blocks: Array, position: int, values: tuple[int, int]) -> None:
    size = keys.shape[1]
    block = int(blocks[position // size])
    assert 0 <= block < len(keys), "a block outside the pool"
    keys[block, position % size, 0] = values


def cached(keys: Array, blocks: Sequence[int] | Array, count: int) -> Array:
    """The first `count` rows [count, head_dim] of a request's cache."""
    return keys[np.asarray(blocks, int)].reshape(-1, keys.shape[-1])[:count]


def _total(keys: Array, blocks: Array, position: int, shift: int = 0) -> int:
    rows = cached(keys, blocks[: position // keys.shape[1] + 1], position + 1)
    tokens = rows[:, 0].astype(np.int64)
    return int((tokens * PLACES[shift : shift + len(tokens)]).sum() % PRIME)


def fake_package(
    target: FakeTarget | None = None,
    head: FakeHead | None = None,
    *,
    context_length: int = 256,
    dense: bool = False,
) -> LoadedPackage:
    """A package around the fakes: a head, capacity for CAPACITY - 1 drafts, no stop ids, dense checkpoints or none."""
    geometry, checkpoints = Geometry(), CAPACITY if dense else 0
    package = Package(
        folder=Path("fake"),
        target=GraphFile(Path("fake/model.onnx"), contract.target_io(geometry, "float32", CAPACITY, checkpoints)),
        mtp=GraphFile(Path("fake/mtp.onnx"), contract.mtp_io(geometry, "float32")),
        full_layers=(1,),
        linear_layers=(0, 2),
        linear_num_key_heads=1,
        capacity=CAPACITY,
        checkpoints=checkpoints,
        vocab_size=VOCAB,
        context_length=context_length,
        block_size=4,
        max_batch_size=8,
        max_draft_tokens=CAPACITY - 1,
        eos_token_ids=(),
    )
    made = head or FakeHead()
    sessions = {"target": target or FakeTarget(), "unpacked": None, "mtp": lambda: made}
    return cast(LoadedPackage, SimpleNamespace(package=package, **sessions))
