"""export(): options, what is left out, and what never happens on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import builder
from builder import reader
from builder.errors import Refused
from builder.exporter import ExportOptions
from fixtures.writer import Config, Tensors, Tiny
from tests.builder import oracle
from tests.builder.test_package import LAYOUTS, lasting, substance
from tests.conftest import TinyFactory

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("weights", "move", "--weights: expected auto or link or copy"),
        ("dtype", "float32", "--dtype: expected auto or float16 or bfloat16"),
        ("mtp", "on", "--mtp: expected auto or off or require"),
        ("checkpoints", "sparse", "--checkpoints: expected compact or dense or off"),
        ("block_size", 0, "--block-size: expected a power of two"),
        ("block_size", 8, "--block-size: expected a power of two"),
        ("block_size", 48, "--block-size: expected a power of two"),
        ("max_draft_tokens", 0, "--max-draft-tokens: expected 1 to 7"),
        ("max_draft_tokens", 8, "--max-draft-tokens: expected 1 to 7"),
        ("max_batch_size", 0, "--max-batch-size: expected 1 to 256"),
        ("max_batch_size", 257, "--max-batch-size: expected 1 to 256"),
        ("context_length", 0, "--context-length: expected 1 to 512"),
        ("context_length", 513, "--context-length: expected 1 to 512"),
        ("context_length", -1, "--context-length: expected 1 to 512"),
    ],
)
def test_an_option_out_of_range_is_refused(
    tiny: TinyFactory, tmp_path: Path, option: str, value: object, expected: str
) -> None:
    with pytest.raises(Refused) as caught:
        builder.export(tiny("modelopt"), tmp_path / "out", ExportOptions(**{option: value}))  # type: ignore[arg-type]
    assert expected in str(caught.value) and str(value) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


@pytest.mark.parametrize(
    "options",
    [
        ExportOptions(weights="copy", block_size=16, max_batch_size=256, max_draft_tokens=7, context_length=512),
        ExportOptions(block_size=4096, max_batch_size=1, max_draft_tokens=1, context_length=1),
    ],
    ids=["most", "least"],
)
def test_the_ends_of_every_range_are_in_it(tiny: TinyFactory, tmp_path: Path, options: ExportOptions) -> None:
    builder.export(tiny("modelopt"), tmp_path / "out", options)
    package = reader.read(tmp_path / "out")
    for name in ("block_size", "max_batch_size", "max_draft_tokens", "context_length"):
        assert getattr(package, name) == getattr(options, name)


# The MTP head


def drop(*names: str) -> object:
    return lambda tensors, config: [tensors.pop(name) for name in names]


def test_an_absent_head_is_a_warning_or_refused(tiny: TinyFactory, tmp_path: Path) -> None:
    folder = tiny("modelopt", Tiny(mtp=False))
    report = builder.export(folder, tmp_path / "auto")
    assert report.graphs["mtp"] is None and not (tmp_path / "auto" / "mtp.onnx").exists()
    assert report.warnings == ["exported without an MTP head: config.json promises one but no mtp.* tensor is there"]
    with pytest.raises(Refused, match=r"tensor mtp\.fc\.weight: .*--mtp require.*--mtp auto"):
        builder.export(folder, tmp_path / "required", ExportOptions(mtp="require"))
    assert not (tmp_path / "required").exists()
    assert builder.export(folder, tmp_path / "off", ExportOptions(mtp="off")).warnings == []


def test_a_model_that_never_had_a_head_is_no_warning(tiny: TinyFactory, tmp_path: Path) -> None:
    folder = tiny("modelopt", Tiny(mtp=False), lambda tensors, config: config.pop("mtp_num_hidden_layers"))
    assert builder.export(folder, tmp_path / "out").warnings == []


@pytest.mark.parametrize("mtp", ["auto", "require"])
@pytest.mark.parametrize(
    "missing",
    [
        "mtp.fc.weight",
        "mtp.norm.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.layers.0.self_attn.q_proj.weight",
        "mtp.layers.0.self_attn.k_norm.weight",
        "mtp.layers.0.mlp.down_proj.weight",
        "mtp.layers.0.post_attention_layernorm.weight",
    ],
)
def test_half_a_head_is_refused_by_its_missing_tensor(
    tiny: TinyFactory, tmp_path: Path, missing: str, mtp: str
) -> None:
    folder = tiny("modelopt", edit=drop(missing))  # type: ignore[arg-type]
    with pytest.raises(Refused, match=f"MTP head: expected all of it, found half of it, without {missing}; "):
        builder.export(folder, tmp_path / "out", ExportOptions(mtp=mtp))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_off_leaves_the_head_out_without_a_word(tiny: TinyFactory, tmp_path: Path) -> None:
    """Half a head too: nobody asked for it."""
    for name, folder in (("whole", tiny("modelopt")), ("half", tiny("modelopt", edit=drop("mtp.fc.weight")))):  # type: ignore[arg-type]
        report = builder.export(folder, tmp_path / name, ExportOptions(mtp="off"))
        assert report.graphs["mtp"] is None and report.warnings == [] and report.skipped_tensors["unclaimed"] == 0
        assert not (tmp_path / name / "mtp.onnx").exists()


def test_a_head_on_disk_is_exported_whatever_the_configuration_says(tiny: TinyFactory, tmp_path: Path) -> None:
    folder = tiny("modelopt", edit=lambda tensors, config: config.update(mtp_num_hidden_layers=0))
    assert builder.export(folder, tmp_path / "out", ExportOptions(mtp="require")).graphs["mtp"] is not None


# Number formats


def test_a_bfloat16_value_beyond_float16_wants_bfloat16(tiny: TinyFactory, tmp_path: Path) -> None:
    name = "model.layers.1.linear_attn.in_proj_b.weight"

    def edit(tensors: Tensors, config: Config) -> None:
        tensors[name][2, 5] = 131072.0

    folder = tiny("modelopt", edit=edit)
    for dtype in ("auto", "float16"):
        with pytest.raises(Refused, match=rf"tensor {name}: .*found 131072.*--dtype bfloat16"):
            builder.export(folder, tmp_path / dtype, ExportOptions(dtype=dtype))  # type: ignore[arg-type]
        assert not (tmp_path / dtype).exists()
    builder.export(folder, tmp_path / "out", ExportOptions(dtype="bfloat16"))
    weight = oracle.initializer(tmp_path / "out", name)
    assert weight.dtype == ml_dtypes.bfloat16 and weight[2, 5] == 131072.0


def test_a_float32_embedding_beyond_float16_is_no_trouble_to_bfloat16(tiny: TinyFactory, tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: Config) -> None:
        embedding = tensors["model.embed_tokens.weight"].astype(np.float32)
        embedding[4, 4] = 70000.0
        tensors["model.embed_tokens.weight"] = embedding

    folder = tiny("modelopt", edit=edit)
    builder.export(folder, tmp_path / "out", ExportOptions(dtype="bfloat16"))
    with pytest.raises(Refused, match=r"tensor model\.embed_tokens\.weight: .*found 70000"):
        builder.export(folder, tmp_path / "no", ExportOptions(dtype="float16"))


def test_weights_of_quantized_ops_are_never_narrowed(tiny: TinyFactory, tmp_path: Path) -> None:
    """An FP8 scale that makes weights of 500,000 stays float32: the op multiplies in float32."""

    def edit(tensors: Tensors, config: Config) -> None:
        tensors["model.layers.3.self_attn.o_proj.weight_scale"][...] = 2.0**10

    builder.export(tiny("modelopt", edit=edit), tmp_path / "out")
    scale = oracle.initializer(tmp_path / "out", "model.layers.3.self_attn.o_proj.fp8_weight_scale")
    assert scale.dtype == np.float32 and np.all(scale == 1024)


# What is skipped


def test_vision_tensors_are_skipped_and_counted(real_checkpoint: Path, tmp_path: Path) -> None:
    report = builder.export(real_checkpoint, tmp_path / "out")
    names = list(oracle.read_checkpoint(real_checkpoint))
    vision = sum(".visual." in name for name in names)
    inputs = sum(name.endswith((".input_scale", ".input_global_scale")) for name in names)
    assert vision == (33 if real_checkpoint.name.endswith("_vl") else 0)
    others = {"kv_scales": 0, "mtp": 0, "unclaimed": 0}
    assert report.skipped_tensors == {"vision": vision, "activation_scales": inputs, **others}
    assert report.warnings == []
    names = {tensor.name for tensor in oracle.graph(tmp_path / "out").initializer}
    assert not any("visual" in name for name in names)


@pytest.mark.parametrize(
    "edit",
    [
        lambda tensors, config: None,
        lambda tensors, config: config.update(architectures=["Qwen3_5ForConditionalGeneration"]),
        lambda tensors, config: config.update(vision_config={"hidden_size": 1}),
        lambda tensors, config: config.update(config.pop("text_config")),
    ],
    ids=["as written", "architectures", "vision_config", "text class over vision names"],
)
def test_spellings_of_one_checkpoint_give_one_package(tiny: TinyFactory, tmp_path: Path, edit: object) -> None:
    for ours, options in LAYOUTS.items():
        builder.export(tiny("modelopt", Tiny(vision=True)), tmp_path / "expected" / ours, options)
        builder.export(tiny("modelopt", Tiny(vision=True), edit), tmp_path / "out" / ours, options)  # type: ignore[arg-type]
        made = substance(tmp_path / "out" / ours)
        assert made == substance(tmp_path / "expected" / ours)
        assert made.keys() >= {"model.onnx", "mtp.onnx", ours, "genai_config.json"}


def test_the_report_is_json(tiny: TinyFactory, tmp_path: Path) -> None:
    report = builder.export(tiny("modelopt"), tmp_path / "out").to_json()
    assert json.loads(json.dumps(report)) == report
    assert report["package"] == str(tmp_path / "out") and report["seconds"] > 0
    assert report["peak_rss_bytes"] > 10_000_000  # of the whole process, in bytes and not kilobytes


# What never happens


def test_exporting_loads_no_torch_runs_no_code_and_depends_on_no_hash_order(tiny: TinyFactory, tmp_path: Path) -> None:
    """In a process of its own. The checkpoint brings code and a pickle that would leave a mark."""

    def edit(tensors: Tensors, config: Config) -> None:
        config["auto_map"] = {"AutoModelForCausalLM": "modeling_x.Model", "AutoConfig": "modeling_x.Config"}

    folder = tiny("modelopt", edit=edit)
    marker = tmp_path / "marker"
    code = f"open({str(marker)!r}, 'w').close()\n"
    for name in ("modeling_x.py", "sitecustomize.py", "builder.py"):
        (folder / name).write_text(code)
    (folder / "pytorch_model.bin").write_bytes(f"cos\nsystem\n(S'touch {marker}'\ntR.".encode())
    (folder / "chat_template.jinja").write_text(
        "{{ cycler.__init__.__globals__.os.system('touch " + str(marker) + "') }}"
    )
    script = f"""
import json, sys
import builder
before = set(sys.modules)
builder.export({str(folder)!r}, {str(tmp_path / "out")!r})
print(json.dumps([sorted(before), sorted(sys.modules)]))
"""
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    run = subprocess.run(
        [sys.executable, "-c", script], check=True, cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    before, after = (Counter(name.partition(".")[0] for name in names) for names in json.loads(run.stdout))
    assert "onnx" not in before  # `import builder` is cheap
    forbidden = {
        "torch",
        "transformers",
        "onnxruntime",
        "onnxruntime_genai",
        "compressed_tensors",
        "modeling_x",
    }
    assert not forbidden & set(after)
    assert not marker.exists()
    builder.export(folder, tmp_path / "again")
    assert lasting(tmp_path / "again") == lasting(tmp_path / "out")


def test_the_api_is_what_the_package_names() -> None:
    assert sorted(builder.__all__) == [
        *("ExportOptions", "ExportReport", "PackageDiff"),
        *("diff", "export", "inspect", "plan"),
    ]
    for name in builder.__all__:
        assert getattr(builder, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = builder.missing  # type: ignore[attr-defined]
