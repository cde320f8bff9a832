"""The target graph: embedding, hybrid layers, final norm, LM head."""

from __future__ import annotations

from builder import contract
from builder.config import LayerType, ModelConfig
from builder.graph import Graph, Value
from builder.models.attention import Attention
from builder.models.checkpoint_series import add_checkpoints
from builder.models.gated_delta_net import GatedDeltaNet
from builder.models.layers import Embedding, Linear, RMSNorm, TiedHead
from builder.models.mlp import MLP
from builder.models.moe import MoE
from builder.models.step import Step
from builder.quant.modules import ModuleTensors


class DecoderLayer:
    """Norm, mixer, norm, MLP or MoE on a residual stream. The mixer follows the layer's kind."""

    def __init__(self, tensors: ModuleTensors, config: ModelConfig, kind: LayerType) -> None:
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(tensors, "input_layernorm", size, epsilon)
        self.post_attention_layernorm = RMSNorm(tensors, "post_attention_layernorm", size, epsilon)
        self.mlp: MLP | MoE = (
            MoE(tensors.sub("mlp"), size, config.moe)
            if config.moe
            else MLP(tensors.sub("mlp"), size, config.intermediate_size or 0)
        )
        self.mixer: Attention | GatedDeltaNet = (
            Attention(tensors.sub("self_attn"), config)
            if kind == "full_attention"
            else GatedDeltaNet(tensors.sub("linear_attn"), config)
        )

    def __call__(
        self, graph: Graph, residual: Value, branch: Value | None, layer: int, step: Step
    ) -> tuple[Value, Value]:
        """The stream enters and leaves as (residual, branch) whose sum is still to be taken by the next norm."""
        if branch is None:
            normed, total = self.input_layernorm(graph, residual), residual
        else:
            normed, total = self.input_layernorm.after_add(graph, residual, branch)
        with graph.scope("mixer"):
            mixed = self.mixer(graph, normed, layer, step)
        normed, total = self.post_attention_layernorm.after_add(graph, total, mixed)
        with graph.scope("mlp"):
            return total, self.mlp(graph, normed)


class Target:
    """The verifying model. embed_tokens and lm_head are shared with the MTP head."""

    def __init__(self, tensors: ModuleTensors, config: ModelConfig, text_prefix: str) -> None:
        self.config = config
        text = tensors.sub(text_prefix.rstrip("."))
        self.embed_tokens = Embedding(text, "embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(text.sub(f"layers.{i}"), config, kind) for i, kind in enumerate(config.layer_types)]
        self.norm = RMSNorm(text, "norm", config.hidden_size, config.rms_norm_eps)
        # Physical tensors first: a stored LM head is used whatever the tie flag says.
        tied = config.tie_word_embeddings and not tensors.has("lm_head")
        self.lm_head: Linear | TiedHead = (
            TiedHead(self.embed_tokens) if tied else Linear(tensors, "lm_head", config.vocab_size, config.hidden_size)
        )

    def __call__(self, graph: Graph, positions: int, capacity: int, checkpoints: int = 0) -> None:
        """Fills `graph` (made with contract.target_io of the same numbers). positions: rows of the rotary tables."""
        step = Step.of(graph, self.config, positions, capacity)
        residual = self.embed_tokens(graph, graph.input(contract.INPUT_IDS))
        branch: Value | None = None
        for index, layer in enumerate(self.layers):
            with graph.scope(f"layers.{index}"):
                residual, branch = layer(graph, residual, branch, index, step)
        if checkpoints:
            with graph.scope("checkpoints"):
                add_checkpoints(graph, self.config, step)
        finish(graph, self.norm.after_last_add(graph, residual, branch), self.lm_head, contract.HIDDEN_STATES)


def finish(graph: Graph, hidden: Value, lm_head: Linear | TiedHead, hidden_name: str) -> None:
    """Both graphs end alike: post-final-norm hidden states, and logits of every packed row."""
    graph.set_output(hidden_name, hidden)
    with graph.scope("lm_head"):
        logits = lm_head(graph, hidden)
        due = graph.io.output(contract.LOGITS).dtype
        if due == "float32":
            logits = graph.op.Cast(logits, to=1)
    graph.set_output(contract.LOGITS, logits)
