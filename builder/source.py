"""Source: a checkpoint understood. Every tensor is used by a module, skipped for a stated reason, or unclaimed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from builder.checkpoint import Checkpoint, TensorRef, read_header
from builder.config import ModelConfig, parse_config
from builder.errors import MAX_PART, DraftsmithError, Refused
from builder.findings import norm_warnings
from builder.models.decoder import Target
from builder.models.mtp import MtpHead
from builder.quant.crosscheck import declared_disagreements
from builder.quant.linear import FLOAT_DTYPES
from builder.quant.modules import ACTIVATION_SCALES, KV_SCALES, ModuleTensors
from builder.quant.names import FUSED
from builder.quant.tensors import Dense, Nvfp4, QuantTensor

VISION_PREFIXES = ("model.visual.", "visual.")
MTP_PREFIX = "mtp."
EMBEDDING = "embed_tokens.weight"
UNCLAIMED = "unclaimed"


@dataclass(frozen=True)
class Source:
    """Geometry and modules, the linears by module name, and names of skipped tensors by reason.

    Reasons are vision, activation_scales, kv_scales, mtp (with --mtp off) and unclaimed.
    """

    config: ModelConfig
    target: Target
    mtp: MtpHead | None
    linears: Mapping[str, QuantTensor]
    skipped: Mapping[str, list[str]]
    warnings: list[str]

    @property
    def parameters(self) -> dict[str, int]:
        """Weights of the target's linear modules and embedding: all of them, and those that one token passes."""
        config = self.config
        sizes = {
            name: math.prod(linear.shape) for name, linear in self.linears.items() if not name.startswith(MTP_PREFIX)
        }
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        total = sum(sizes.values()) + config.vocab_size * config.hidden_size
        share = experts * config.moe.num_experts_per_tok // config.moe.num_experts if config.moe else 0
        return {"total": total, "active": total - experts + share}

    @property
    def skipped_counts(self) -> dict[str, int]:
        return {reason: len(names) for reason, names in self.skipped.items()}


def read_source(checkpoint: Checkpoint, mtp: str, *, read_values: bool = True, strict: bool = False) -> Source:
    """Reads headers, and unless told otherwise scales and norms, of every module. Raises Refused.

    mtp: "auto", "off" or "require". strict: a tensor that nobody claims is refused.
    """
    config = parse_config(checkpoint.config, str(checkpoint.folder / "config.json"))
    tensors = ModuleTensors.of(_text_tensors(checkpoint, config), read_values=read_values)
    _refuse_fused(tensors)
    target = Target(tensors, config, checkpoint.prefix)
    warnings: list[str] = []
    if config.tie_word_embeddings and tensors.has("lm_head") and f"{checkpoint.prefix}{EMBEDDING}" in checkpoint:
        warnings.append("config.json ties the LM head to the embedding but lm_head is stored: used as stored")
    head = _read_mtp(checkpoint, tensors, config, target, mtp, warnings)
    skipped = _account(checkpoint, tensors.used, without_mtp=mtp == "off")
    warnings += declared_disagreements(checkpoint, tensors.linears)
    warnings += _partial_activation_scales(checkpoint, tensors.linears)
    warnings += _clamped(tensors.linears)
    if read_values:
        warnings += norm_warnings(checkpoint)
    warnings += _unclaimed(checkpoint, skipped[UNCLAIMED], strict)
    return Source(config, target, head, tensors.linears, skipped, warnings)


def _text_tensors(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, TensorRef]:
    """All but the image tower's. Of two tied tensors one may have been saved: a float LM head is the embedding, too."""
    tensors = {name: ref for name, ref in checkpoint.items() if not name.startswith(VISION_PREFIXES)}
    head = tensors.get("lm_head.weight")
    if config.tie_word_embeddings and head is not None and head.dtype in FLOAT_DTYPES:
        tensors.setdefault(f"{checkpoint.prefix}{EMBEDDING}", head)
    return tensors


def _refuse_fused(tensors: ModuleTensors) -> None:
    """Rows of a fused projection lie by key head, by rank or by part, and its name does not tell which."""
    for module in tensors.by_module:
        parent, _, leaf = module.rpartition(".")
        expert = parent.endswith(".experts")  # whose order of rows is known
        if leaf in FUSED and not expert and any(f"{parent}.{part}" not in tensors.by_module for part in FUSED[leaf]):
            raise Refused(
                f"tensor {module}.weight",
                expected=f"{' and '.join(FUSED[leaf])}, a tensor each",
                found="one for all of them",
                remedy="this layout is not supported; use a checkpoint that stores them apart",
            )


def _account(checkpoint: Checkpoint, used: set[str], *, without_mtp: bool) -> dict[str, list[str]]:
    """Every tensor that no module took, by the reason it was left out."""
    skipped: dict[str, list[str]] = {"vision": [], "activation_scales": [], "kv_scales": [], "mtp": [], UNCLAIMED: []}
    for name in checkpoint:
        if name not in used:
            skipped[_reason(name, without_mtp)].append(name)
    return skipped


def _reason(name: str, without_mtp: bool) -> str:
    leaf = name.rpartition(".")[2]
    if name.startswith(VISION_PREFIXES):
        return "vision"
    if without_mtp and name.startswith(MTP_PREFIX):
        return "mtp"
    if leaf.endswith(ACTIVATION_SCALES):
        return "activation_scales"
    return "kv_scales" if leaf in KV_SCALES else UNCLAIMED


def _unclaimed(checkpoint: Checkpoint, names: list[str], strict: bool) -> list[str]:
    if not names:
        return []
    if strict:
        raise Refused(
            f"{checkpoint.folder.name} tensor {names[0]}",
            expected="a module that uses it (--strict)",
            found=f"{len(names)} tensors that none does",
            remedy="export without --strict to leave them out",
        )
    return [f"{len(names)} tensors belong to no module and were left out, the first {names[0]}"]


def _partial_activation_scales(checkpoint: Checkpoint, linears: Mapping[str, QuantTensor]) -> list[str]:
    """Activation scales on some modules of a format and not on others hint at a damaged file; we use none of them."""
    warnings = []
    for kind in dict.fromkeys(linear.kind for linear in linears.values() if not isinstance(linear, Dense)):
        modules = [name for name, linear in linears.items() if linear.kind == kind]
        bare = [name for name in modules if not any(f"{name}.{leaf}" in checkpoint for leaf in ACTIVATION_SCALES)]
        if bare and len(bare) < len(modules):
            first = ", ".join(bare[:3])
            warnings.append(
                f"{len(bare)} of {len(modules)} {kind} modules have no input scale (none is used here): {first}"
            )
    return warnings


def _clamped(linears: Mapping[str, QuantTensor]) -> list[str]:
    clamped = [name for name, linear in linears.items() if isinstance(linear, Nvfp4) and linear.clamp_nan]
    if not clamped:
        return []
    return [
        f"{len(clamped)} modules have NaN scales over blocks of zeros (read as 448, so they stay zero), "
        f"the first {clamped[0]}"
    ]


def _read_mtp(
    checkpoint: Checkpoint,
    tensors: ModuleTensors,
    config: ModelConfig,
    target: Target,
    mtp: str,
    warnings: list[str],
) -> MtpHead | None:
    """The head where its tensors are on disk. Half a head is always refused, naming what is missing."""
    if mtp == "off":
        return None
    view = tensors.sub("mtp")
    if any(name.startswith(MTP_PREFIX) for name in checkpoint):
        missing = [module for module in MtpHead.modules(config) if not view.has(module)]
        if missing:
            raise Refused(
                f"{checkpoint.folder.name} MTP head",
                expected="all of it",
                found=f"half of it, without {_listed(missing)}",
                remedy="fetch the missing shard, or export with --mtp off",
            )
        return MtpHead(view, config, target)
    unlisted = _unlisted_heads(checkpoint)
    if mtp == "require":
        raise Refused(
            f"{checkpoint.folder.name} tensor mtp.fc.weight",
            expected="an MTP head (--mtp require)",
            found=unlisted or "no mtp.* tensor",
            remedy="use a checkpoint that kept its head, or --mtp auto",
        )
    if unlisted:
        warnings.append(f"exported without an MTP head: {unlisted}")
    elif config.mtp_num_hidden_layers:
        warnings.append("exported without an MTP head: config.json promises one but no mtp.* tensor is there")
    return None


def _listed(missing: list[str]) -> str:
    """Names of the head's tensors, shortened where an error's line would cut the last ones off."""
    names = ", ".join(f"mtp.{module}.weight" for module in missing)
    if len(names) <= MAX_PART - 50:
        return names
    layer = [module.removeprefix("layers.0.") for module in missing if module.startswith("layers.0.")]
    outer = [module for module in missing if not module.startswith("layers.0.")]
    places = {"mtp.": outer, "mtp.layers.0.": layer}
    return " and ".join(f"{place} {', '.join(modules)}" for place, modules in places.items() if modules)


def _unlisted_heads(checkpoint: Checkpoint) -> str | None:
    """Says where mtp.* tensors lie that the index does not list: a shard added by hand is not read."""
    for path in checkpoint.unlisted_shards():
        try:
            names = [name for name in read_header(path) if name.startswith(MTP_PREFIX)]
        except (DraftsmithError, OSError):
            continue  # nobody asked for this file
        if names:
            return f"{path.name} holds {len(names)} mtp.* tensors that the index does not list"
    return None
