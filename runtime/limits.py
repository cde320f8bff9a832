"""What an engine and its requests may ask for, and what is refused before any memory is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, get_args

from builder import contract
from builder.errors import Refused
from builder.reader import Package
from runtime import memory
from runtime.fixed_state import StateGeometry
from runtime.sampling import SamplingOptions

FLOAT_BYTES = 4
MAX_LOGITS_BYTES = 1 << 28
"""The target makes one row of logits per packed token; prompts are cut so that a step's logits stay below this."""


Proposer = Literal["mtp", "ngram"]
"""Where drafts come from: the package's head, or earlier text (no head is loaded)."""


@dataclass(frozen=True)
class EngineOptions:
    """num_blocks: None is room for one request of full context. block_size, max_draft_tokens: None is the package's.

    max_draft_tokens 0 makes a plain engine, which does not load the head; a head that is loaded follows every request.
    """

    num_blocks: int | None = None
    block_size: int | None = None
    max_batch_size: int = 8
    max_scheduled_tokens: int = 2048
    max_draft_tokens: int | None = None
    proposer: Proposer = "mtp"


def draft_limit(package: Package, asked: int | None, proposer: Proposer = "mtp") -> int:
    """Drafts per request and step: what is asked for, or the limit of package and proposer. Raises Refused beyond it.

    A head is promised for max_draft_tokens drafts; any others are bounded by what can be captured, the anchor included.
    """
    if proposer not in get_args(Proposer):
        raise Refused("--proposer", expected="mtp or ngram", found=proposer, remedy="choose one of them")
    limit = package.max_draft_tokens if package.mtp and package.capacity else 0
    if proposer == "ngram":
        limit = max(0, package.capacity - 1)
    if asked is None:
        return limit
    if not 0 <= asked <= limit:
        raise Refused(
            "--draft-tokens",
            expected=f"0 to {limit}, the package's limit",
            found=asked,
            remedy=f"ask for fewer, or {_more_drafts(package)}",
        )
    return asked


def _more_drafts(package: Package) -> str:
    """What would raise a package's limit."""
    if package.overlay:
        return f"leave --overlay {package.overlay} out"
    if not package.capacity:
        return "export with --checkpoints compact"
    return "export with a larger --max-draft-tokens" if package.mtp else "use --proposer ngram: it has no MTP head"


def whole(value: object) -> int | None:
    """A whole number as Python's own, whose arithmetic does not wrap; None for anything else, True and False too."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def in_plain_numbers(options: EngineOptions) -> EngineOptions:
    """Options whose numbers are Python's own. Raises Refused for one that is no whole number."""
    names = ("num_blocks", "block_size", "max_batch_size", "max_scheduled_tokens", "max_draft_tokens")
    found: dict[str, Any] = {name: getattr(options, name) for name in names}
    for name, value in found.items():
        if value is not None and whole(value) is None:
            option = "--draft-tokens" if name == "max_draft_tokens" else f"--{name.replace('_', '-')}"
            raise Refused(option, expected="a whole number", found=value, remedy="choose another")
    plain: dict[str, Any] = {name: value if value is None else whole(value) for name, value in found.items()}
    return replace(options, **plain)


def check_sizes(options: EngineOptions, block_size: int) -> None:
    """Raises Refused for a size below 1."""
    sizes = {
        "--num-blocks": options.num_blocks,
        "--block-size": block_size,
        "--max-batch-size": options.max_batch_size,
        "--max-scheduled-tokens": options.max_scheduled_tokens,
    }
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise Refused(name, expected="1 or more", found=size, remedy="choose another")


def check_request(prompt: Sequence[int], max_new_tokens: int, package: Package) -> None:
    """Raises Refused for a prompt or length that this package can never serve."""
    if (whole(max_new_tokens) or 0) < 1:
        raise Refused("--max-new-tokens", expected="1 or more", found=max_new_tokens, remedy="ask for more")
    if len(prompt) == 0:
        raise Refused("prompt", expected="at least one token", found="none", remedy="give a prompt")
    if len(prompt) > package.context_length:
        raise Refused(
            "prompt",
            expected=f"at most {package.context_length} tokens, the package's context",
            found=len(prompt),
            remedy="shorten it",
        )
    check_tokens("prompt", prompt, package.vocab_size)


def check_stops(stops: Sequence[int], sampling: SamplingOptions, package: Package) -> None:
    """Raises Refused for stop ids that are no tokens, or that leave none to reach a minimum length with."""
    check_tokens("stop_token_ids", stops, package.vocab_size)
    if sampling.min_new_tokens and len(set(stops)) >= package.vocab_size:
        raise Refused(
            "min_new_tokens", expected="a token that is no stop id", found="none", remedy="leave the minimum out"
        )


_NONE = object()


def check_tokens(name: str, tokens: Sequence[int], size: int) -> None:
    """Raises Refused for anything that is no token id below `size`."""
    bad = next((token for token in tokens if not 0 <= (-1 if whole(token) is None else int(token)) < size), _NONE)
    if bad is not _NONE:
        raise Refused(name, expected=f"token ids below {size}", found=bad, remedy="use this package's tokenizer")


def step_tokens(package: Package, asked: int) -> int:
    """Packed rows of a step: what was asked for, as long as their logits stay below MAX_LOGITS_BYTES."""
    return min(asked, max(1, MAX_LOGITS_BYTES // (4 * package.vocab_size)))


def require_memory(package: Package, cached_tokens: int, num_slots: int, *, with_head: bool, drafting: bool) -> None:
    """Raises MachineError when caches of cached_tokens tokens and num_slots states exceed the machine's free memory."""
    layers = len(package.full_layers) + with_head
    values_per_token = 0
    if package.full_layers:
        heads, dim = package.target.io.input(contract.PAST_KEY.format(package.full_layers[0])).shape[2:]
        values_per_token = 2 * layers * int(heads) * int(dim)
    geometry = StateGeometry.of(package)
    caches = FLOAT_BYTES * values_per_token * cached_tokens
    states = num_slots * (geometry.bytes_per_slot + geometry.staged_bytes_per_slot) if geometry else 0
    if geometry and drafting:
        states += num_slots * geometry.checkpoint_bytes_per_slot
    memory.require(
        caches + states, "caches and states", "ask for fewer blocks (--num-blocks) or requests (--max-batch-size)"
    )
