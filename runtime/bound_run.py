"""BoundRun: one prepared run of a graph, over arrays that are bound once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from builder.errors import MachineError, one_line
from runtime.place import Array, DeviceArray, Place, element_type
from runtime.transfer import Block

ORT_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    *(kind for kind in vars(ort_state).values() if isinstance(kind, type) and issubclass(kind, Exception)),
)
"""Everything ONNX Runtime raises; its exceptions have no common base of their own."""


class BoundRun:
    """Every array must be C-contiguous. NumPy arrays may be changed between runs.

    On a host they are bound as they are. On a device, `on_host` inputs aside, those that go in and those that come out
    have a block of memory there each; a run copies the first one to the device if it has changed, the other one back.

    graph_id: number of the recorded run, -1 for none of them; 0 where the session records nothing.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        place: Place,
        inputs: Mapping[str, Array | DeviceArray],
        outputs: Mapping[str, Array | DeviceArray],
        on_host: Collection[str] = (),
    ) -> None:
        self._session = session
        self._binding = session.io_binding()
        self.inputs, self.outputs = inputs, outputs  # the runtime only holds their addresses
        self._sent = None if place.is_host else _block(inputs, place, on_host)
        self._fetched = None if place.is_host else _block(outputs, place, ())
        self.graph_id = 0
        for arrays, block, bind in (
            (inputs, self._sent, self._binding.bind_input),
            (outputs, self._fetched, self._binding.bind_output),
        ):
            moved = block.parts if block else {}
            for name, array in arrays.items():
                _bind(bind, name, moved.get(name, array))

    def run(self) -> None:
        """Raises MachineError where the runtime fails."""
        try:
            if self._sent:
                self._sent.send()
            if self.graph_id:
                options = ort.RunOptions()
                options.add_run_config_entry("gpu_graph_id", str(self.graph_id))
                self._session.run_with_iobinding(self._binding, options)
            else:
                self._session.run_with_iobinding(self._binding)
            if self._fetched:
                self._fetched.fetch()
        except ORT_ERRORS as error:
            raise MachineError(f"ONNX Runtime failed in the middle of a run: {one_line(error)}") from error


def _block(arrays: Mapping[str, Array | DeviceArray], place: Place, on_host: Collection[str]) -> Block | None:
    """Memory for the NumPy arrays among these, if there are any."""
    moved = {
        name: array for name, array in arrays.items() if not isinstance(array, DeviceArray) and name not in on_host
    }
    return Block(moved, place) if moved else None


def _bind(bind: Callable[..., None], name: str, array: Array | DeviceArray) -> None:
    """The runtime takes the address alone and would read past any stride."""
    if isinstance(array, DeviceArray):
        bind(name, array.device, 0, element_type(array.dtype), array.shape, array.address)
        return
    if not array.flags.c_contiguous:
        raise AssertionError("only C-contiguous arrays can be bound")
    bind(name, "cpu", 0, element_type(array.dtype), array.shape, int(array.__array_interface__["data"][0]))
