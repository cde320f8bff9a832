"""A package's graphs against the contract, the manifest and the data files, without running them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import onnx
import onnx_ir as ir

from builder import contract, graph_file, ops
from builder.checks import Check, judged
from builder.contract import IoSpec, TensorSpec
from builder.errors import Refused
from builder.graph import IR_VERSION, OPSETS
from builder.manifest import MANIFEST_FILE, Manifest
from builder.reader import CONFIG_FILE, MAX_DIGITS, GraphFile, Package, integer, sizes
from builder.record_checks import WRITTEN_FILES
from builder.weights import LARGE_BYTES, SMALL_ALIGNMENT

RE_EXPORT = "export the package again"
T = TypeVar("T")


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
    protos = {name: graph_file.load(graph.path) for name, graph in present.items()}
    made: list[Geometry] = []
    yield judged("geometry", lambda: _measured(package, config, made))
    due = _due(package, made[0]) if made else {}
    for name, graph in present.items():
        file, proto = graph.path.name, protos[name]
        if due:
            yield judged(f"interface {file}", _bind(_interface, graph, due[name]))
        yield judged(f"operators {file}", _bind(_operators, proto, file, found))
        yield judged(f"aliasing {file}", _bind(_aliasing, package, proto, name))
        if package.checkpoints and name == "target":
            yield judged(f"checkpoints {file}", _bind(_checkpoints, package, proto))
        if found is not None:
            yield judged(f"initializers {file}", _bind(_recorded, proto, file, found))
            yield judged(f"census {file}", _bind(_census, proto, file, found, name))
    yield judged("data", lambda: _data(package, [*itertools.chain.from_iterable(map(external, protos.values()))]))
    if package.mtp:
        yield judged("shared initializers", lambda: _shared(config, protos))


def _measured(package: Package, config: dict[str, Any], made: list[Geometry]) -> str:
    """Puts the geometry into `made`, where it is one."""
    made.append(_geometry(package, config))
    return f"{len(made[0].layer_types)} layers of {made[0].hidden_size}"


def _due(package: Package, geometry: Geometry) -> dict[str, IoSpec]:
    dtype = package.target.io.output(contract.HIDDEN_STATES).dtype
    target = contract.target_io(geometry, dtype, package.capacity, package.checkpoints)
    return {"target": target, "mtp": contract.mtp_io(geometry, dtype)}


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
    """Raises Refused naming what the configuration lacks; reader.read has checked the states' sizes."""
    decoder = config["model"]["decoder"]
    keys = ("hidden_size", "num_key_value_heads", "head_size", "num_hidden_layers")
    hidden, kv_heads, head_dim, layers = (integer(f"model.decoder.{key}", decoder.get(key), 1) for key in keys)
    listed = sorted((*package.full_layers, *package.linear_layers))
    if layers != len(listed) or listed != [*range(len(listed))]:
        raise Refused(
            f"{CONFIG_FILE} model.decoder.num_hidden_layers",
            expected=f"as many as the layers of state_groups, {listed}",
            found=layers,
            remedy=RE_EXPORT,
        )
    heads = value_dim = key_dim = kernel = channels = 0
    if package.linear_layers:
        heads, value_dim, key_dim = sizes(package.target, contract.PAST_RECURRENT.format(package.linear_layers[0]), 4)
        channels, kernel = sizes(package.target, contract.PAST_CONV.format(package.linear_layers[0]), 3)
    return Geometry(
        hidden_size=hidden,
        vocab_size=package.vocab_size,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        linear_num_key_heads=package.linear_num_key_heads or (channels - heads * value_dim) // max(1, 2 * key_dim),
        linear_num_value_heads=heads,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
        linear_conv_kernel_dim=kernel + 1,
        layer_types=tuple("full_attention" if id in package.full_layers else "linear_attention" for id in listed),
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
    for node in graph_file.nodes(model.graph):
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
    count = sum(1 for _ in graph_file.nodes(model.graph))
    return f"IR {model.ir_version}, opset {opsets['']}, {count} nodes of {len(used)} ops"


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
        right = (
            node
            and node.op_type == op_type
            and inputs[taken : taken + 1] == [past]
            and outputs[given : given + 1] == [present]
        )
        if not right:
            raise Refused(
                f"{package.folder.name} {name} output {present}",
                expected=f"output {given} of a {op_type} whose input {taken} is {past}",
                found=f"{node.op_type} of {', '.join(inputs)}" if node else "nothing that makes it",
                remedy=RE_EXPORT,
            )
    return f"{len(full)} caches and {len(linear)} states" if linear else f"{len(full)} caches"


def _checkpoints(package: Package, model: onnx.ModelProto) -> str:
    """All come out of one branch, which is taken where the step captures, and each is made of its own layer's states.

    The recurrence's updates of all layers are aligned together, so they do not tell layers apart.
    """
    made = {output: node for node in model.graph.node for output in node.output if output}
    names = contract.checkpoint_names(package.linear_layers)
    for name, taken in zip(names, _sources(package), strict=True):
        node = made.get(name)
        condition = made.get(node.input[0]) if node and node.op_type == "If" and node.input else None
        if not node or not condition or list(condition.input) != [contract.CAPTURE_ACTIVE]:
            found = f"{node.op_type} of {', '.join(node.input)}" if node else "nothing that makes it"
            raise Refused(
                f"{package.folder.name} target output {name}",
                expected=f"an If on {contract.CAPTURE_ACTIVE}",
                found=found,
                remedy=RE_EXPORT,
            )
        branch = next(entry.g for entry in node.attribute if entry.name == "then_branch")
        used = _reached(branch, branch.output[list(node.output).index(name)].name)
        states = {template.format(layer) for template in STATES for layer in package.linear_layers} & used
        if states != taken:
            raise Refused(
                f"{package.folder.name} target output {name}",
                expected=f"made of {', '.join(sorted(taken))}",
                found=", ".join(sorted(states)) or "neither",
                remedy=RE_EXPORT,
            )
    return f"{package.checkpoints} checkpoints of {len(package.linear_layers)} layers"


STATES = (contract.PAST_CONV, contract.CONV_UPDATE, contract.PAST_RECURRENT)


def _sources(package: Package) -> Iterator[set[str]]:
    """Of each checkpoint output the values it is made of."""
    for layer in package.linear_layers:
        yield {contract.PAST_CONV.format(layer), contract.CONV_UPDATE.format(layer)}
        yield {contract.PAST_RECURRENT.format(layer)}


def _reached(graph: onnx.GraphProto, name: str) -> set[str]:
    """Every value that `name` is made of, itself and those of an outer graph included."""
    made = {output: node for node in graph.node for output in node.output if output}
    found, waiting = {name}, [name]
    while waiting:
        node = made.get(waiting.pop())
        fresh = set(node.input) - found if node else set()
        found |= fresh
        waiting += fresh
    return found


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


MATMULS = {"nvfp4": "MatMulBlockQuantizedFp4Weight", "fp8": "MatMulBlockQuantizedFp8Weight", "float": "Gemm"}
SAME_OP = {"mxfp4": "nvfp4", "mxfp8": "fp8"}
"""Formats that one op carries."""
EXPERT_OPS = {"QMoE": "quantized", "MoE": "float"}


def _census(model: onnx.ModelProto, file: str, found: Manifest, graph: str) -> str:
    """Modules by format and experts are as many as the manifest counts. graph: its name there."""
    recorded = found.census.get("graphs", {}).get(graph, {})
    ops = Counter(node.op_type for node in model.graph.node)
    shapes = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    experts: Counter[str] = Counter()
    for node in model.graph.node:
        if node.op_type in EXPERT_OPS:
            experts[EXPERT_OPS[node.op_type]] += _experts(model, node, shapes)
    matmuls: Counter[str] = Counter()
    for kind, count in recorded.get("matmuls", {}).items():
        matmuls[SAME_OP.get(kind, kind)] += count
    counted: Counter[str] = Counter()
    for kind, count in recorded.get("experts", {}).items():
        counted["float" if kind == "float" else "quantized"] += count
    facts = [(f"{kind} modules", matmuls[kind], ops[op]) for kind, op in MATMULS.items()]
    facts += [(f"{kind} experts", counted[kind], experts[kind]) for kind in EXPERT_OPS.values()]
    for what, expected, actual in facts:
        if expected != actual:
            raise Refused(f"{file} {what}", expected=f"{expected} ({MANIFEST_FILE})", found=actual, remedy=RE_EXPORT)
    return ", ".join(f"{count:,} {what}" for what, count, _ in facts if count)


def _experts(model: onnx.ModelProto, node: onnx.NodeProto, shapes: dict[str, Any]) -> int:
    """First dimension of the weights, which may pass a Cast on the way."""
    name = node.input[2]
    made = next((other.input[0] for other in model.graph.node if name in other.output), name)
    return int(shapes[made][0])


def _data(package: Package, initializers: Sequence[Initializer]) -> str:
    """Every range has its type's and shape's length, none overlaps another in part, and no byte we wrote is left."""
    for each in initializers:
        if each.length != each.due:
            raise Refused(f"initializer {each.name}", expected=f"{each.due} bytes", found=each.length, remedy=RE_EXPORT)
    places = sorted({(each.file, each.offset, each.length) for each in initializers})
    for (file, offset, length), (other, start, _) in itertools.pairwise(places):
        if file == other and start < offset + length:
            raise Refused(f"{file} bytes from {start}", expected="one use", found="two that overlap", remedy=RE_EXPORT)
    for file in WRITTEN_FILES:  # covered to the byte; a linked shard also holds what no graph uses
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
    target, head = ({each.name: each for each in external(protos[name])} for name in ("target", "mtp"))
    counts = []
    for section in ("decoder", "mtp"):
        key = f"{CONFIG_FILE} model.{section}.shared_initializers"
        entries = _of_type(key, config["model"][section].get("shared_initializers", []), list)
        counts.append(len(entries))
        for index, entry in enumerate(entries):
            name, due = _entry(f"{key}[{index}]", entry)
            for graph in (target, head):
                each = graph.get(name)
                found = (each.file, each.offset, each.length, each.shape) if each else None
                if found != due:
                    raise Refused(f"{key}[{index}] {name}", expected=found, found=due, remedy=RE_EXPORT)
    return f"{counts[-1]} in one place for both graphs"


def _entry(place: str, entry: Any) -> tuple[str, tuple[str, int, int, tuple[int, ...]]]:
    """Name; file, offset and length in bytes, and shape. Raises Refused for what is missing or of another type."""
    fields = _of_type(place, entry, dict)
    name = _of_type(f"{place} name", fields.get("name"), str)
    file = _of_type(f"{place} data_file", fields.get("data_file"), str)
    offset, length = (_bytes(f"{place} {name} {key}", fields.get(key)) for key in ("offset", "length"))
    shape = _of_type(f"{place} {name} shape", fields.get("shape"), list)
    return name, (file, offset, length, tuple(_of_type(f"{place} {name} shape", size, int) for size in shape))


JSON_TYPES = {list: "a list", dict: "an object", str: "text", int: "an integer"}


def _of_type(subject: str, value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise Refused(subject, expected=JSON_TYPES[kind], found=value, remedy=RE_EXPORT)
    return value


def _bytes(subject: str, value: Any) -> int:
    """onnxruntime-genai writes numbers of bytes as text."""
    text = str(value) if type(value) in (int, str) else ""
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise Refused(subject, expected="a number of bytes", found=value, remedy=RE_EXPORT)
    return int(text)
