"""DraftMemory: what the runs of one chain of drafts leave on a device, where the next run of the chain finds it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from builder import contract
from runtime.place import DeviceArray, Place
from runtime.sampling import refuse_unnumbered


class DraftMemory:
    """token_ids [depth, rows] int64, logits [depth, rows] of these tokens, hidden [depth, rows, hidden] behind them.

    A run of the head writes a row of each. Ids and logits lie in one piece, so one copy brings a chain to the host.
    """

    def __init__(self, io: contract.IoSpec, depth: int, rows: int, place: Place) -> None:
        self.depth, self.rows = depth, rows
        hidden, logits = io.output(contract.HEAD_HIDDEN_STATES), io.output(contract.LOGITS)
        ids_type, logits_type = np.dtype(np.int64), place.array_type(logits)
        size = depth * rows * ids_type.itemsize
        self._block = place.device_zeros((size + depth * rows * logits_type.itemsize,), np.dtype(np.uint8))
        self.token_ids, self.logits = (
            DeviceArray((depth, rows), dtype, self._block.address + offset, place.device, self._block.owner)
            for dtype, offset in ((ids_type, 0), (logits_type, size))
        )
        self.hidden = place.device_zeros((depth, rows, int(hidden.shape[1])), place.array_type(hidden))

    def read(self, counts: Sequence[int]) -> list[list[int]]:
        """The first counts[s] tokens of run s; the only copy to the host. Raises DraftsmithError for NaN logits."""
        block = self._block.read()
        size = self.token_ids.nbytes
        token_ids = block[:size].view(self.token_ids.dtype).reshape(self.token_ids.shape)
        logits = block[size:].view(self.logits.dtype).reshape(self.logits.shape)
        for run, count in enumerate(counts):
            refuse_unnumbered(logits[run, :count])
        return [token_ids[run, :count].tolist() for run, count in enumerate(counts)]
