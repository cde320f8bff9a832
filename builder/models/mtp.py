"""The multi-token-prediction head: one full-attention layer that drafts the token after next.

Row p takes the target's post-final-norm hidden state of position p and token p + 1; a chained draft takes the head's
own post-norm output instead. Source: transformers' MtpModel with the Qwen names (checkpoints.md section 1.4).
"""

from __future__ import annotations

from builder import contract
from builder.config import ModelConfig
from builder.graph import Graph
from builder.models.decoder import DecoderLayer, Target, finish
from builder.models.layers import Linear, RMSNorm
from builder.models.step import Step
from builder.quant.modules import ModuleTensors


class MtpHead:
    """fc(concat[norm(embed(token)), norm(hidden)]), one decoder layer, norm, the target's LM head."""

    MODULES = (
        "fc",
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
        "norm",
        "layers.0.input_layernorm",
        "layers.0.post_attention_layernorm",
        *(f"layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    )
    """What a checkpoint must hold under `mtp.` for there to be a head, beside its MLP."""
    MLP = tuple(f"layers.0.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
    MOE = (
        "layers.0.mlp.gate",
        "layers.0.mlp.experts",
        *(f"layers.0.mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
        "layers.0.mlp.shared_expert_gate",
    )

    @classmethod
    def modules(cls, config: ModelConfig) -> tuple[str, ...]:
        """Names under `mtp.` that a head of this model has."""
        return (*cls.MODULES, *(cls.MOE if config.moe else cls.MLP))

    def __init__(self, tensors: ModuleTensors, config: ModelConfig, target: Target) -> None:
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.embed_tokens = target.embed_tokens
        self.lm_head = target.lm_head
        self.pre_fc_norm_embedding = RMSNorm(tensors, "pre_fc_norm_embedding", size, epsilon)
        self.pre_fc_norm_hidden = RMSNorm(tensors, "pre_fc_norm_hidden", size, epsilon)
        self.fc = Linear(tensors, "fc", size, 2 * size)
        self.layer = DecoderLayer(tensors.sub("layers.0"), config, "full_attention")
        self.norm = RMSNorm(tensors, "norm", size, epsilon)

    def __call__(self, graph: Graph, positions: int) -> None:
        """Fills `graph` (made with contract.mtp_io)."""
        step = Step.of(graph, self.config, positions, capacity=0)
        embedded = self.pre_fc_norm_embedding(graph, self.embed_tokens(graph, graph.input(contract.INPUT_IDS)))
        hidden = self.pre_fc_norm_hidden(graph, graph.input(contract.HIDDEN_STATES))
        # The embedding comes first; the reversed order loads and drafts nonsense.
        residual = self.fc(graph, graph.op.Concat(embedded, hidden, axis=-1))
        with graph.scope("layers.0"):
            total, branch = self.layer(graph, residual, None, 0, step)
        finish(graph, self.norm.after_last_add(graph, total, branch), self.lm_head, contract.HEAD_HIDDEN_STATES)
