"""What files and stored tensors mean, from the formats' definitions alone: safetensors' own reader and float64.

Shares nothing with builder, so that the two can disagree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import safetensors
from numpy.typing import NDArray

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
"""Value of each code. Source: OCP Microscaling Formats v1.0, table of FP4 E2M1."""


@dataclass(frozen=True)
class Raw:
    """A tensor as safetensors' own reader gives it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def bytes_array(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.data, np.uint8).reshape(self.shape)

    def values(self) -> NDArray[np.float64]:
        """The numbers of a float tensor, or of one of exponents."""
        if self.dtype == "F8_E4M3":
            return e4m3(self.bytes_array())
        if self.dtype in ("U8", "F8_E8M0"):
            return e8m0(self.bytes_array())
        if self.dtype == "BF16":  # the upper half of a float32
            return (
                (np.frombuffer(self.data, np.uint16).astype(np.uint32) << 16)
                .view(np.float32)
                .reshape(self.shape)
                .astype(np.float64)
            )
        return (
            np.frombuffer(self.data, {"F32": np.float32, "F16": np.float16}[self.dtype])
            .reshape(self.shape)
            .astype(np.float64)
        )


def e4m3(codes: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Sign, 4 exponent bits with bias 7, 3 mantissa bits, no infinity; 0x7F and 0xFF are NaN. Source: OCP FP8 v1.0."""
    exponent, mantissa = (codes.astype(np.int64) >> 3) & 15, codes & 7
    values = np.where(exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    values[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes < 128, values, -values)


def e8m0(codes: NDArray[np.uint8]) -> NDArray[np.float64]:
    """2 ** (code - 127), and 255 is NaN. Source: OCP Microscaling Formats v1.0."""
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int64) - 127))


def e2m1(packed: NDArray[np.uint8]) -> NDArray[np.float64]:
    """[N, K / 2] bytes to [N, K] values, written as the plainest loop there is."""
    rows = [[value for byte in row for value in (E2M1[byte % 16], E2M1[byte // 16])] for row in packed.tolist()]
    return np.array(rows, np.float64)


def read_checkpoint(folder: Path) -> dict[str, Raw]:
    """Every tensor, from the shard that the index assigns it to."""
    index = folder / "model.safetensors.index.json"
    shards: dict[str, str] | None = json.loads(index.read_text())["weight_map"] if index.is_file() else None
    found: dict[str, Raw] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in safetensors.deserialize(path.read_bytes()):
            if shards is None or shards.get(name) == path.name:
                found[name] = Raw(entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
    return found


def weight(tensors: dict[str, Raw], module: str) -> NDArray[np.float64]:
    """The dequantized weight [N, K] of a linear module in float64, whoever stored it in whatever format."""
    own = {name.rpartition(".")[2]: raw for name, raw in tensors.items() if name.rpartition(".")[0] == module}
    return linear(own) if own else fused_expert(tensors, module)


def fused_expert(tensors: dict[str, Raw], module: str) -> NDArray[np.float64]:
    """An expert of `experts.gate_up_proj` [E, 2 I, H], gate rows first, or of `experts.down_proj` [E, H, I]."""
    experts, _, rest = module.rpartition(".experts.")
    expert, _, part = rest.partition(".")
    if part == "down_proj":
        return tensors[f"{experts}.experts.down_proj"].values()[int(expert)]
    gate_up = tensors[f"{experts}.experts.gate_up_proj"].values()[int(expert)]
    inner = len(gate_up) // 2
    return gate_up[:inner] if part == "gate_proj" else gate_up[inner:]


def linear(own: dict[str, Raw]) -> NDArray[np.float64]:
    """The same from the module's own tensors by last name part."""
    packed = own["weight_packed"] if "weight_packed" in own else own["weight"]
    scale = own["weight_scale_inv"] if "weight_scale_inv" in own else own.get("weight_scale")
    if scale is None:
        return packed.values()
    if packed.dtype == "U8":
        codes, columns = e2m1(packed.bytes_array()), 2 * packed.shape[1]
        values = codes * np.repeat(scale.values(), columns // scale.shape[1], axis=1)
        if "weight_global_scale" in own:
            return values * (1 / own["weight_global_scale"].values().reshape(()))
        return values * own["weight_scale_2"].values().reshape(()) if "weight_scale_2" in own else values
    return packed.values() * _fp8_scale(packed, scale)


def _fp8_scale(weight: Raw, scale: Raw) -> NDArray[np.float64]:
    """The scale of every weight [N, K], looked up by the weight's own indices."""
    rows, columns = np.indices(weight.shape)
    stored = scale.values()
    if stored.size == 1:
        return np.full(weight.shape, stored.reshape(()))
    if scale.dtype in ("U8", "F8_E8M0") and scale.shape == (weight.shape[0], weight.shape[1] // 32):
        return stored[rows, columns // 32]
    if stored.ndim == 4:
        return stored[rows // 128, 0, columns // 128, 0]
    if stored.size != weight.shape[0]:
        return stored[rows // 128, columns // 128]
    return stored.reshape(-1)[rows]


def graph(package: Path, file: str = "model.onnx") -> onnx.GraphProto:
    """A graph of a package without its weights."""
    return onnx.load(package / file, load_external_data=False).graph


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph, and those of its nodes' branches."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs(attribute.g)


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Those of branches too."""
    return (node for one in graphs(graph) for node in one.node)


def place(tensor: onnx.TensorProto) -> tuple[str, int, int]:
    """File, offset and length of an external initializer."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return entries["location"], int(entries["offset"]), int(entries["length"])


def value(package: Path, tensor: onnx.TensorProto) -> NDArray[Any]:
    """An initializer's value, read by its file and offset: onnx itself refuses data files that are hard links."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return onnx.numpy_helper.to_array(tensor)
    name, offset, length = place(tensor)
    with (package / name).open("rb") as file:
        file.seek(offset)
        data = file.read(length)
    return np.frombuffer(data, onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).reshape(list(tensor.dims))


def initializer(package: Path, name: str, file: str = "model.onnx") -> NDArray[Any]:
    """The value of an initializer of a package's graph."""
    return value(package, next(tensor for tensor in graph(package, file).initializer if tensor.name == name))


def packaged_weights(package: Path, file: str = "model.onnx") -> dict[str, NDArray[np.float64]]:
    """What the quantized initializers of a package mean, by module, after the ops' documentation."""
    own = graph(package, file)
    tensors = {tensor.name: tensor for tensor in own.initializer}
    found: dict[str, NDArray[np.float64]] = {}
    for node in own.node:
        if node.op_type not in ("MatMulBlockQuantizedFp8Weight", "MatMulBlockQuantizedFp4Weight"):
            continue
        codes, *scales = (value(package, tensors[name]) for name in node.input[1:])
        (block,) = (attribute.i for attribute in node.attribute if attribute.name == "block_size")
        if node.op_type == "MatMulBlockQuantizedFp8Weight":
            values, scale = e4m3(codes.view(np.uint8)), scales[0].astype(np.float64)
        else:
            values, scale = e2m1(codes), e4m3(scales[0]) * scales[1].astype(np.float64)
        module = node.input[1].rpartition(".")[0]
        found[module] = values * np.repeat(scale, block, axis=1)[:, : values.shape[1]]
    return found


def dims(value: onnx.ValueInfoProto) -> list[int | str | None]:
    """Symbols, sizes, and None for a dimension that nothing is known of."""
    return [
        dim.dim_param if dim.HasField("dim_param") else dim.dim_value if dim.HasField("dim_value") else None
        for dim in value.type.tensor_type.shape.dim
    ]


def element_types(graph: onnx.GraphProto) -> dict[str, str]:
    """The type of every value of a graph and its branches in the words of the schemas, such as tensor(float16)."""
    values = [value for one in graphs(graph) for value in (*one.value_info, *one.input, *one.output)]
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    names = {number: name.lower() for name, number in onnx.TensorProto.DataType.items()}
    return {name: f"tensor({names[number]})" for name, number in types.items()}
