"""The residual stream of our packages against transformers' own, taken by hooks, in a dense model and a mixture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import builder
from builder.errors import Refused
from fixtures import CHECKPOINTS, LAYERS, TRACED, TRAINED
from runtime import VerifyOptions, load, verify
from runtime.trace import residual_stream
from tests.damage import Damage, damaged, doubled_norm, swapped

pytestmark = pytest.mark.reference

MIXTURE = CHECKPOINTS / "trained_mo_moe_text"
Array = NDArray[np.float32]


class Stream:
    """transformers in float32 on one prompt: input_ids [1, T], logits [1, T, vocab], hidden: its output_hidden_states,
    and by hooks the stream behind each mixer and behind each layer, [L, T, hidden].
    """

    def __init__(self, checkpoint: Path) -> None:
        import torch

        from fixtures.trained import oracle

        torch.set_num_threads(2)
        target, _ = oracle.load(checkpoint)
        self.input_ids = np.load(checkpoint / "reference.npz")["prompt_1"][None]
        mixers: list[Array] = []
        layers: list[Array] = []
        for layer in target.get_decoder().layers:
            layer.post_attention_layernorm.register_forward_pre_hook(
                lambda module, inputs: mixers.append(inputs[0][0].numpy())
            )
            layer.register_forward_hook(lambda module, inputs, output: layers.append(output[0].numpy()))
        with torch.no_grad():
            output = target(input_ids=torch.from_numpy(self.input_ids), use_cache=False, output_hidden_states=True)
        self.logits = output.logits.numpy()
        self.hidden = [state.numpy() for state in output.hidden_states]
        self.mixers, self.layers = np.stack(mixers), np.stack(layers)

    def save(self, path: Path, layers: Array) -> Path:
        np.savez(path, input_ids=self.input_ids, logits=self.logits, layer_hidden_states=layers)
        return path


@pytest.fixture(scope="module", params=[TRAINED, MIXTURE], ids=lambda folder: folder.name)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture(scope="module")
def stream(checkpoint: Path) -> Stream:
    return Stream(checkpoint)


@pytest.fixture(scope="module")
def package(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traced") / "package"
    builder.export(checkpoint, folder)
    return folder


def test_behind_mixers_and_behind_layers(package: Path, stream: Stream) -> None:
    """Within 2e-5, which is what the 1e-6 in transformers' norm of queries and keys comes to in layer 0."""
    found = residual_stream(load(package), stream.input_ids[0].tolist(), "cpu")
    for ours, theirs in ((found[0::2], stream.mixers), (found[1::2], stream.layers)):
        errors = np.linalg.norm(ours - theirs, axis=(1, 2)) / np.linalg.norm(theirs, axis=(1, 2))
        assert ours.shape == theirs.shape and errors.max() < 2e-5


def test_what_is_left_without_transformers_epsilon(
    checkpoint: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's own definition: queries and keys are divided by their norm."""
    import torch
    from transformers.models.qwen3_5 import modeling_qwen3_5
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

    def l2norm(x: torch.Tensor, dim: int = -1, eps: float = 0.0) -> torch.Tensor:
        return x / x.norm(dim=dim, keepdim=True)

    for module in (modeling_qwen3_5, modeling_qwen3_5_moe):
        monkeypatch.setattr(module, "l2norm", l2norm)
    stream = Stream(checkpoint)
    found = residual_stream(load(package), stream.input_ids[0].tolist(), "cpu")[1::2]
    errors = np.linalg.norm(found - stream.layers, axis=(1, 2)) / np.linalg.norm(stream.layers, axis=(1, 2))
    assert errors.max() < 1e-6


def test_a_sound_package(package: Path, stream: Stream, tmp_path: Path) -> None:
    found = verify(package, VerifyOptions(reference=stream.save(tmp_path / "r.npz", stream.layers), trace=True))
    assert found.ok and len(found.trace) == 8


def test_transformers_list_of_hidden_states_as_the_documentation_says_to_take_it(
    package: Path, stream: Stream, tmp_path: Path
) -> None:
    """The first is the embedding, the last one is behind the final norm, and the others are what hooks see."""
    between = np.stack(stream.hidden[1:-1])
    np.testing.assert_array_equal(between[:, 0], stream.layers[:-1])
    assert np.abs(stream.hidden[-1][0] - stream.layers[-1]).max() > 0.1
    found = verify(package, VerifyOptions(reference=stream.save(tmp_path / "r.npz", between), trace=True))
    assert found.ok and len(found.trace) == 7
    np.savez(
        tmp_path / "w.npz",
        input_ids=stream.input_ids,
        logits=stream.logits,
        last_hidden_state=stream.hidden[-1],
        layer_hidden_states=np.stack(stream.hidden[1:]),
    )
    with pytest.raises(Refused, match="before the final norm"):
        verify(package, VerifyOptions(reference=tmp_path / "w.npz", trace=True))


@pytest.mark.parametrize(
    ("name", "damage", "layer"),
    [
        ("mixer", doubled_norm("model.layers.4.input_layernorm.weight"), 4),
        ("MLP", doubled_norm("model.layers.6.post_attention_layernorm.weight"), 6),
        ("attention", doubled_norm("model.layers.3.self_attn.q_norm.weight"), 3),
        (
            "convolution",
            swapped("model.layers.1.linear_attn.conv1d.weight", "model.layers.5.linear_attn.conv1d.weight"),
            1,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_layer_that_was_damaged_is_named(
    checkpoint: Path, stream: Stream, name: str, damage: Damage, layer: int, tmp_path: Path
) -> None:
    builder.export(damaged(checkpoint, tmp_path / "checkpoint", damage), tmp_path / "package")
    reference = stream.save(tmp_path / "r.npz", stream.layers)
    found = verify(tmp_path / "package", VerifyOptions(reference=reference, trace=True))
    details = {check.name: check.detail for check in found.checks if not check.ok}
    assert details["trace"].startswith(f"layer {layer} ("), name


def test_two_experts_in_each_others_place(tmp_path: Path) -> None:
    """Only the tokens that chose them are off."""
    experts = "model.layers.5.mlp.experts"
    stream = Stream(MIXTURE)
    damage = swapped(f"{experts}.0.up_proj.weight", f"{experts}.1.up_proj.weight")
    builder.export(damaged(MIXTURE, tmp_path / "checkpoint", damage), tmp_path / "package")
    reference = stream.save(tmp_path / "r.npz", stream.layers)
    found = verify(tmp_path / "package", VerifyOptions(reference=reference, trace=True))
    details = {check.name: check.detail for check in found.checks if not check.ok}
    assert details["trace"].startswith("layer 5 (linear_attention)")


def test_the_stored_layers_are_what_transformers_gives() -> None:
    """layers.npz was not made by hand."""
    from fixtures.modelopt.layers import layer_outputs
    from fixtures.modelopt.prompt import prompt_ids
    from fixtures.modelopt.reference import load as load_reference

    target, _ = load_reference(TRACED)
    found = layer_outputs(target, prompt_ids(target.config.vocab_size))
    np.testing.assert_allclose(found, np.load(LAYERS)["layer_hidden_states"], rtol=0, atol=1e-4)
