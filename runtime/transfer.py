"""Block: NumPy arrays that lie in one piece on a device, so that one copy takes them all there or back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnxruntime as ort

from runtime.place import Array, DeviceArray, Place

ALIGNMENT = 256
"""Bytes: what kernels expect of an address, as allocators give it."""
COMPARED_BYTES = 1 << 16
"""Larger arrays are sent without a look at whether they changed."""


class Block:
    """parts: each array's memory on the device, by name. The arrays stay the caller's, who may change them."""

    def __init__(self, arrays: Mapping[str, Array], place: Place) -> None:
        offsets, size = {}, 0
        for name, array in arrays.items():
            offsets[name] = size
            size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        self._bytes = np.zeros(size, np.uint8)
        memory = place.device_zeros((size,), self._bytes.dtype)
        self._memory: ort.OrtValue = memory.owner
        self._mark = ort.OrtValue.ortvalue_from_numpy(np.zeros(1, np.uint8), place.device, 0)
        self._sent = False
        self.parts, self._places = {}, []
        for name, array in arrays.items():
            start, end = offsets[name], offsets[name] + array.nbytes
            address = memory.address + start
            self.parts[name] = DeviceArray(array.shape, array.dtype, address, place.device, memory.owner)
            self._places.append((array, slice(start, end)))

    def send(self) -> bool:
        """Takes the arrays to the device if a byte has changed since the last time, and says whether one had."""
        changed = not self._sent
        self._sent = False  # until it has arrived: what fails in between is sent again
        for array, place in self._places:
            mirror, given = self._bytes[place], array.reshape(-1).view(np.uint8)
            if changed or array.nbytes > COMPARED_BYTES or not np.array_equal(mirror, given):
                mirror[:] = given
                changed = True
        if changed:
            self._memory.update_inplace(self._bytes)
            # A copy from pageable memory may return before it has arrived, and the session's stream does not wait for
            # the stream of these copies; reading back does.
            self._mark.numpy()
        self._sent = True
        return changed

    def fetch(self) -> None:
        """Brings what the device holds into the arrays."""
        found = self._memory.numpy()
        for array, place in self._places:
            array[...] = found[place].view(array.dtype).reshape(array.shape)
