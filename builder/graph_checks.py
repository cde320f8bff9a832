"""A package's graphs against the contract, the manifest and the data files, without running them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir

from builder import contract, ops
from builder.checks import Check, judged
from builder.contract import IoSpec, TensorSpec
from builder.errors import Refused
from builder.graph import IR_VERSION, OPSETS
from builder.manifest import MANIFEST_FILE, Manifest
from builder.package import DATA_FILE, TRANSFORMED_FILE
from builder.reader import CONFIG_FILE, GraphFile, Package
from builder.weights import LARGE_BYTES, SMALL_ALIGNMENT

RE_EXPORT = "export the package again"
WRITTEN_FILES = (DATA_FILE, TRANSFORMED_FILE)
"""Data files that an export writes, and so covers to the byte; a linked shard also holds what no graph uses."""


@dataclass(frozen=True)
class Geometry:
    """contract.Geometry as the package itself tells it: configuration first, then the states' shapes."""

    hidden_size: int
    vocab_size: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    layer_types: tuple[str, ...]

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values side by side."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim


@dataclass(frozen=True)
class Initializer:
    """An initializer in a data file: offset and length in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int

    @property
    def due(self) -> int:
        """Bytes of its type and shape."""
        return int(math.prod(self.shape) * ir.DataType[self.dtype.upper()].itemsize)


def check_graphs(package: Package, config: dict[str, Any], found: Manifest | None) -> Iterator[Check]:
    """Interface, operators and aliasing of each graph, and the data that both refer to."""
    graphs = {"target": package.target, "mtp": package.mtp}
    present = {name: graph for name, graph in graphs.items() if graph}
    protos = {name: onnx.load(graph.path, load_external_data=False) for name, graph in present.items()}
    geometry = _geometry(package, config)
    dtype = package.target.io.output(contract.HIDDEN_STATES).dtype
    due = {
        "target": contract.target_io(geometry, dtype, package.capacity),
        "mtp": contract.mtp_io(geometry, dtype),
    }
    for name, graph in present.items():
        file, proto = graph.path.name, protos[name]
        yield judged(f"interface {file}", _bind(_interface, graph, due[name]))
        yield judged(f"operators {file}", _bind(_operators, proto, file, found))
        yield judged(f"aliasing {file}", _bind(_aliasing, package, proto, name))
        if found is not None:
            yield judged(f"initializers {file}", _bind(_recorded, proto, file, found))
    yield judged("data", lambda: _data(package, [*itertools.chain.from_iterable(map(external, protos.values()))]))
    if package.mtp:
        yield judged("shared initializers", lambda: _shared(config, protos))


def _bind(judge: Callable[..., str], *arguments: Any) -> Callable[[], str]:
    return lambda: judge(*arguments)


def external(model: onnx.ModelProto) -> list[Initializer]:
    """Initializers whose bytes lie in a data file; reader.read has checked that the entries are numbers."""
    found = []
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            place = {entry.key: entry.value for entry in tensor.external_data}
            offset, length = int(place.get("offset", 0)), int(place["length"])
            dtype = ir.DataType(tensor.data_type).name.lower()
            found.append(Initializer(tensor.name, dtype, tuple(tensor.dims), place["location"], offset, length))
    return found


def _geometry(package: Package, config: dict[str, Any]) -> Geometry:
    decoder, io = config["model"]["decoder"], package.target.io
    heads: contract.Dim = 0
    value_dim = key_dim = kernel = channels = heads
    if package.linear_layers:
        heads, value_dim, key_dim = io.input(contract.PAST_RECURRENT.format(package.linear_layers[0])).shape[1:]
        channels, kernel = io.input(contract.PAST_CONV.format(package.linear_layers[0])).shape[1:]
    keys = package.linear_num_key_heads or (int(channels) - int(heads) * int(value_dim)) // max(1, 2 * int(key_dim))
    kinds = dict.fromkeys(package.full_layers, "full_attention")
    kinds |= dict.fromkeys(package.linear_layers, "linear_attention")
    return Geometry(
        hidden_size=decoder["hidden_size"],
        vocab_size=package.vocab_size,
        num_key_value_heads=decoder["num_key_value_heads"],
        head_dim=decoder["head_size"],
        linear_num_key_heads=keys,
        linear_num_value_heads=int(heads),
        linear_key_head_dim=int(key_dim),
        linear_value_head_dim=int(value_dim),
        linear_conv_kernel_dim=int(kernel) + 1,
        layer_types=tuple(kinds.get(layer, "none") for layer in range(decoder["num_hidden_layers"])),
    )


def _interface(graph: GraphFile, due: IoSpec) -> str:
    """Names, ranks, sizes and types are the contract's for this geometry."""
    for side in ("inputs", "outputs"):
        expected = {spec.name: spec for spec in getattr(due, side)}
        found = {spec.name: spec for spec in getattr(graph.io, side)}
        for name in [*expected, *found]:
            if expected.get(name) != found.get(name):
                raise Refused(
                    f"{graph.path.name} {side[:-1]} {name}",
                    expected=_text(expected.get(name)),
                    found=_text(found.get(name)),
                    remedy=RE_EXPORT,
                )
    return f"{len(due.inputs)} inputs and {len(due.outputs)} outputs"


def _text(spec: TensorSpec | None) -> str:
    return f"{spec.dtype} [{', '.join(map(str, spec.shape))}]" if spec else "none"


def _operators(model: onnx.ModelProto, file: str, found: Manifest | None) -> str:
    """IR version, opsets, and of each contrib op the attributes that its release knows and the manifest names."""
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    for key, expected, actual in (("ir_version", IR_VERSION, model.ir_version), ("opsets", OPSETS, opsets)):
        if expected != actual:
            raise Refused(f"{file} {key}", expected=expected, found=actual, remedy=RE_EXPORT)
    used: dict[tuple[str, str], set[str]] = {}
    for node in model.graph.node:
        used.setdefault((node.domain, node.op_type), set()).update(attribute.name for attribute in node.attribute)
        schema = ops.SCHEMAS.get(node.op_type)
        if node.domain == ops.DOMAIN and (schema is None or not used[node.domain, node.op_type] <= schema.attributes):
            raise Refused(
                f"{file} {node.name}",
                expected=f"an op of ONNX Runtime {ops.MINIMUM_RUNTIME} with its attributes",
                found=f"{node.op_type} {sorted(used[node.domain, node.op_type])}",
                remedy=RE_EXPORT,
            )
    _same_as_recorded(used, file, found)
    return f"IR {model.ir_version}, opset {opsets['']}, {len(model.graph.node)} nodes of {len(used)} ops"


def _same_as_recorded(used: dict[tuple[str, str], set[str]], file: str, found: Manifest | None) -> None:
    if found is None or file not in found.graphs:
        return
    recorded = {(op.domain, op.op): set(op.attributes) for op in found.graphs[file].required_ops}
    actual = {(domain or "ai.onnx", op): attributes for (domain, op), attributes in used.items()}
    for key in sorted({*recorded, *actual}):
        if recorded.get(key) != actual.get(key):
            raise Refused(
                f"{file} {'::'.join(key)}",
                expected=_attributes(recorded.get(key)),
                found=_attributes(actual.get(key)),
                remedy=RE_EXPORT,
            )


def _attributes(names: set[str] | None) -> str:
    return "no such op" if names is None else f"attributes {sorted(names)}"


def _aliasing(package: Package, model: onnx.ModelProto, name: str) -> str:
    """Caches and states come out of the op that takes them in, at the places where it updates or replaces them."""
    made = {output: node for node in model.graph.node for output in node.output if output}
    full = package.full_layers if name == "target" else (0,)
    linear = package.linear_layers if name == "target" else ()
    pairs: list[tuple[str, int, str, int, str]] = []
    for layer in full:
        pairs.append(("PagedAttention", 3, contract.PAST_KEY.format(layer), 1, contract.PRESENT_KEY.format(layer)))
        pairs.append(("PagedAttention", 4, contract.PAST_VALUE.format(layer), 2, contract.PRESENT_VALUE.format(layer)))
    for layer in linear:
        conv, net = "VarlenCausalConvWithState", "GatedDeltaNet"
        pairs.append((conv, 4, contract.PAST_CONV.format(layer), 1, contract.PRESENT_CONV.format(layer)))
        pairs.append((net, 6, contract.PAST_RECURRENT.format(layer), 1, contract.PRESENT_RECURRENT.format(layer)))
        if package.capacity:
            pairs.append((conv, 4, contract.PAST_CONV.format(layer), 2, contract.CONV_UPDATE.format(layer)))
            pairs.append((net, 6, contract.PAST_RECURRENT.format(layer), 2, contract.RECURRENT_UPDATE.format(layer)))
    for op_type, taken, past, given, present in pairs:
        node = made.get(present)
        inputs, outputs = (list(node.input), list(node.output)) if node else ([], [])
        right = node and node.op_type == op_type and inputs[taken : taken + 1] == [past] and outputs[given] == present
        if not right:
            raise Refused(
                f"{package.folder.name} {name} output {present}",
                expected=f"output {given} of a {op_type} whose input {taken} is {past}",
                found=f"{node.op_type} of {', '.join(inputs)}" if node else "nothing that makes it",
                remedy=RE_EXPORT,
            )
    return f"{len(full)} caches and {len(linear)} states" if linear else f"{len(full)} caches"


def _recorded(model: onnx.ModelProto, file: str, found: Manifest) -> str:
    """Each initializer lies where the manifest says, with its type and shape."""
    recorded = found.initializers.get(file, {})
    actual = {
        each.name: (each.file, each.offset, each.length, each.dtype, list(each.shape)) for each in external(model)
    }
    for name in [*recorded, *actual]:
        entry = recorded.get(name)
        due = (entry.file, entry.offset, entry.length, entry.dtype, entry.shape) if entry else None
        if due != actual.get(name):
            raise Refused(
                f"{file} initializer {name}",
                expected=f"{due} ({MANIFEST_FILE})",
                found=actual.get(name),
                remedy=RE_EXPORT,
            )
    return f"{len(actual)} as {MANIFEST_FILE} has them"


def _data(package: Package, initializers: Sequence[Initializer]) -> str:
    """Every range has its type's and shape's length, none overlaps another in part, and no byte we wrote is left."""
    for each in initializers:
        if each.length != each.due:
            raise Refused(f"initializer {each.name}", expected=f"{each.due} bytes", found=each.length, remedy=RE_EXPORT)
    places = sorted({(each.file, each.offset, each.length) for each in initializers})
    for (file, offset, length), (other, start, _) in itertools.pairwise(places):
        if file == other and start < offset + length:
            raise Refused(f"{file} bytes from {start}", expected="one use", found="two that overlap", remedy=RE_EXPORT)
    for file in WRITTEN_FILES:
        if (package.folder / file).is_file():
            _covered(package, file, [(offset, length) for name, offset, length in places if name == file])
    files = {file for file, _, _ in places}
    return f"{sum(length for _, _, length in places):,} bytes in {len(files)} files"


def _covered(package: Package, file: str, ranges: Sequence[tuple[int, int]]) -> None:
    """Nothing but alignment lies between and behind the ranges."""
    end = 0
    for offset, length in [*ranges, ((package.folder / file).stat().st_size, 0)]:
        alignment = 1 if not length else LARGE_BYTES if length >= LARGE_BYTES else SMALL_ALIGNMENT
        if offset != -(-end // alignment) * alignment:
            raise Refused(
                f"{file} bytes from {end} to {offset}",
                expected="an initializer's or alignment",
                found="bytes that no graph uses",
                remedy=RE_EXPORT,
            )
        end = offset + length


def _shared(config: dict[str, Any], protos: dict[str, onnx.ModelProto]) -> str:
    """What genai_config.json lists as shared lies at one place for both graphs, and at that one."""
    model = config["model"]
    target, head = ({each.name: each for each in external(protos[name])} for name in ("target", "mtp"))
    for section in ("decoder", "mtp"):
        for entry in model[section].get("shared_initializers", []):
            name = entry["name"]
            due = (entry["data_file"], int(entry["offset"]), int(entry["length"]), tuple(entry["shape"]))
            for graph in (target, head):
                each = graph.get(name)
                found = (each.file, each.offset, each.length, each.shape) if each else None
                if found != due:
                    raise Refused(
                        f"{CONFIG_FILE} {section} shared_initializers {name}",
                        expected=found,
                        found=due,
                        remedy=RE_EXPORT,
                    )
    return f"{len(model['mtp'].get('shared_initializers', []))} in one place for both graphs"
