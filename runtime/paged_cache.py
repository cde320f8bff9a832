"""PagedCache: key and value memory of a graph's attention layers, updated in place by every run."""

from __future__ import annotations

from collections.abc import Sequence

from builder import contract
from runtime.place import Array, DeviceArray, Place


class PagedCache:
    """Arrays [num_blocks, block_size, kv_heads, head_dim], zeroed; the same memory is a run's input and its output."""

    def __init__(
        self, io: contract.IoSpec, layers: Sequence[int], num_blocks: int, block_size: int, place: Place
    ) -> None:
        self.inputs: dict[str, Array | DeviceArray] = {}
        self.outputs: dict[str, Array | DeviceArray] = {}
        pairs = ((contract.PAST_KEY, contract.PRESENT_KEY), (contract.PAST_VALUE, contract.PRESENT_VALUE))
        for layer in layers:
            for past, present in pairs:
                spec = io.input(past.format(layer))
                heads, dim = map(int, spec.shape[2:])
                array = place.zeros((num_blocks, block_size, heads, dim), place.array_type(spec))
                self.inputs[spec.name] = self.outputs[present.format(layer)] = array
