"""ModuleTensors: one module's view of the checkpoint, by the names its own code uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from builder.checkpoint import TensorRef
from builder.errors import Refused
from builder.quant.experts import DOWN, GATE, UP, Experts, Sizes, source_name, split, stored_under
from builder.quant.linear import FLOAT_DTYPES, read_linear
from builder.quant.scales import check_scales
from builder.quant.tensors import QuantTensor

ACTIVATION_SCALES = ("input_scale", "input_global_scale")
KV_SCALES = ("k_scale", "v_scale")
"""Tensors that quantize activations and the KV cache: known and counted, never emitted."""


@dataclass(frozen=True)
class ModuleTensors:
    """The checkpoint under a dotted prefix ("" or "model.layers.3."), and a record of what was taken from it.

    by_module: tensors by module name and last name part. All views of one checkpoint share the records: `linears`
    (module name to QuantTensor) and `used` (tensor names). read_values: scales are read and checked; without it
    nothing but headers is. whole_norms: norm weights are stored as 1 + w, as converters do that lay convolutions out
    as [C, K, 1].
    """

    by_module: Mapping[str, Mapping[str, TensorRef]]
    prefix: str = ""
    linears: dict[str, QuantTensor] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    read_values: bool = True
    whole_norms: bool = False

    @classmethod
    def of(cls, tensors: Mapping[str, TensorRef], *, read_values: bool = True) -> ModuleTensors:
        by_module: dict[str, dict[str, TensorRef]] = {}
        for name, ref in tensors.items():
            module, _, leaf = name.rpartition(".")
            by_module.setdefault(module, {})[leaf] = ref
        return cls(by_module, read_values=read_values, whole_norms=_converted(tensors))

    def sub(self, name: str) -> ModuleTensors:
        """The view of a child module; `name` may be dotted."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def has(self, module: str) -> bool:
        """Whether the module, or a container of that name, has tensors."""
        return stored_under(self.by_module, f"{self.prefix}{module}")

    def tensor(self, name: str, *shapes: tuple[int, ...]) -> TensorRef:
        """A float tensor such as `A_log` or `input_layernorm.weight`, in one of the given shapes. Raises Refused."""
        full = f"{self.prefix}{name}"
        module, _, leaf = full.rpartition(".")
        ref = self.by_module.get(module, {}).get(leaf)
        if ref is None:
            raise Refused(f"tensor {full}", expected="it", found="none", remedy="check that every shard is there")
        if ref.dtype not in FLOAT_DTYPES or ref.shape not in shapes:
            raise Refused(
                f"tensor {full}",
                expected=f"{' or '.join(FLOAT_DTYPES)} {' or '.join(str(list(s)) for s in shapes)}",
                found=f"{ref.dtype} {list(ref.shape)}",
                remedy="check that config.json belongs to this checkpoint",
            )
        self.used.add(full)
        return ref

    def linear(self, name: str, out_features: int, in_features: int) -> QuantTensor:
        """The weight [out_features, in_features] of a linear module, its scales read and checked. Raises Refused."""
        module = f"{self.prefix}{name}"
        own = self.by_module.get(module, {})
        quantized = self._read(module, own, (out_features, in_features))
        self.used.update(ref.name for ref in quantized.refs)
        return quantized

    def experts(self, name: str, sizes: Sizes) -> Experts:
        """Experts in any layout that experts.py lists, each read as a linear module. Raises Refused."""
        full = f"{self.prefix}{name}"
        read: dict[str, list[QuantTensor]] = {}
        for projection, modules in split(self.by_module, full, sizes).items():
            shape = sizes.shape(projection)
            read[projection] = [self._read(module, own, shape) for module, own in modules]
        self.used.update(source_name(ref) for weights in read.values() for weight in weights for ref in weight.refs)
        return Experts(*(tuple(read[projection]) for projection in (GATE, UP, DOWN)))

    def _read(self, module: str, own: Mapping[str, TensorRef], shape: tuple[int, int]) -> QuantTensor:
        """own: the module's tensors by last name part."""
        quantized = read_linear(module, own, shape)
        if self.read_values:
            quantized = check_scales(quantized)
        self.linears[module] = quantized
        known = {ref.name for ref in quantized.refs} | {f"{module}.{leaf}" for leaf in (*ACTIVATION_SCALES, *KV_SCALES)}
        stray = sorted(ref.name for leaf, ref in own.items() if ref.name not in known and leaf not in ACTIVATION_SCALES)
        if stray:
            raise Refused(
                f"tensor {stray[0]}",
                expected=f"no such tensor beside a {quantized.kind} weight",
                found="one",
                remedy="this variant is not supported",
            )
        return quantized


def _converted(tensors: Mapping[str, TensorRef]) -> bool:
    """Whether every convolution is [C, K, 1]. Raises Refused where some are and some are not."""
    convolutions = [ref for name, ref in tensors.items() if name.endswith("linear_attn.conv1d.weight")]
    turned = [ref for ref in convolutions if len(ref.shape) == 3 and ref.shape[1] > 1 and ref.shape[2] == 1]
    if turned and len(turned) < len(convolutions):
        raise Refused(
            f"tensor {turned[0].name}",
            expected="one layout of all convolutions, [C, 1, K] or [C, K, 1]",
            found=f"{list(turned[0].shape)} beside the other",
            remedy="convert the checkpoint again; its norm weights cannot be told from it",
        )
    return bool(turned)
