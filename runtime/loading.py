"""load(): a package folder becomes sessions."""

from __future__ import annotations

import math
from pathlib import Path

import onnx

from builder import reader
from builder.reader import GraphFile, Package
from runtime import memory
from runtime.lowering import Edit
from runtime.lowering.unpacking import COLUMNS_PER_ELEMENT
from runtime.place import Place
from runtime.session import ExecutionProvider, Session, place_for
from runtime.unpacked import unpacked_session


class LoadedPackage:
    """A package with its target loaded; the head's session is made when first asked for."""

    def __init__(
        self, package: Package, ep: ExecutionProvider, *, cuda_graph: bool = False, unpacked_weights: bool = False
    ) -> None:
        self.package = package
        self.ep = ep
        self.cuda_graph = cuda_graph
        self.target = open_session(package.target, ep, cuda_graph=cuda_graph)
        self.unpacked: Session | None = None
        if unpacked_weights and not self.target.place.is_host:
            self.unpacked = unpacked_session(package.target, self.target.place, cuda_graph=cuda_graph)
        self._mtp: Session | None = None

    def mtp(self) -> Session:
        if self._mtp is None:
            if self.package.mtp is None:
                raise AssertionError("the package has no MTP head")
            self._mtp = open_session(self.package.mtp, self.ep, cuda_graph=self.cuda_graph)
        return self._mtp


def load(
    path: str | Path,
    ep: ExecutionProvider = "auto",
    overlay: str | None = None,
    *,
    cuda_graph: bool = False,
    unpacked_weights: bool = False,
) -> LoadedPackage:
    """overlay: the name of one of the package's own changes of configuration. cuda_graph: record decode and verify
    steps on a GPU and replay them. unpacked_weights: keep the target's quantized weights a second time on a GPU, two
    bytes each, for steps of many rows. Both are without meaning on a CPU.

    Raises Refused for a package that contradicts itself, MachineError where this machine cannot run it.
    """
    package = reader.read(path, overlay)
    return LoadedPackage(package, ep, cuda_graph=cuda_graph, unpacked_weights=unpacked_weights)


def open_session(
    graph: GraphFile,
    ep: ExecutionProvider,
    edit: Edit | None = None,
    place: Place | None = None,
    *,
    cuda_graph: bool = False,
) -> Session:
    """edit: a change to the graph, in memory. place: instead of the one that `ep` means.

    Raises MachineError where this machine cannot run it.
    """
    place = place or place_for(ep)
    if place.is_host:
        memory.require(_load_bytes(graph), f"the weights of {graph.path.name} in float32", "use a larger machine")
    return Session(graph, ep, edit, place, cuda_graph=cuda_graph)


def _load_bytes(graph: GraphFile) -> int:
    """Memory while the weights are widened: four bytes for each, two of them in a byte of NVFP4, beside the stored."""
    proto = onnx.load(graph.path, load_external_data=False).graph
    products = (node for node in proto.node if node.op_type in COLUMNS_PER_ELEMENT)
    packed = {node.input[1]: COLUMNS_PER_ELEMENT[node.op_type] for node in products}
    widened = sum(4 * math.prod(tensor.dims) * packed.get(tensor.name, 1) for tensor in proto.initializer)
    return widened + sum({(place.file, place.end): place.length for place in graph.data}.values())
