"""The command line as a user meets it: exit codes, one-line refusals, JSON keys, stdout and stderr."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cli import main
from fixtures import CHECKPOINTS, TRAINED

STATS = {
    "rounds",
    "draft_tokens_proposed",
    "draft_tokens_evaluated",
    "draft_tokens_accepted",
    "correction_tokens",
    "bonus_tokens",
    "draft_forward_passes",
    "target_forward_passes",
    "full_accept_rounds",
    "partial_accept_rounds",
    "zero_accept_rounds",
    "accepted_by_position",
}


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def succeed(*arguments: object) -> Any:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refuse(code: int, *arguments: object) -> str:
    """The one line that a refusal says."""
    result = invoke(*arguments)
    assert result.exit_code == code, (result.output, result.exception)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert result.stdout == ""
    return lines[0]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "package"
    assert invoke("export", TRAINED, folder, "--weights", "copy", "-q").exit_code == 0
    return folder


@pytest.fixture(scope="module")
def answers() -> Mapping[str, Any]:
    return dict(np.load(TRAINED / "reference.npz"))


def ids(tokens: Any) -> str:
    return ",".join(map(str, tokens))


def test_help_is_light() -> None:
    """The heavy libraries are not loaded to answer --help."""
    code = "import sys, cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\nprint(*sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "export" in result.stdout
    loaded = set(result.stderr.split())
    assert "click" in loaded
    assert not loaded & {"onnx", "onnxruntime", "onnxscript", "transformers", "numpy", "pydantic", "rich"}


@pytest.mark.parametrize("weights", ["copy", "link"])
def test_export_reports(tmp_path: Path, weights: str) -> None:
    found = succeed("export", TRAINED, tmp_path / "package", "--weights", weights)
    assert found["package"] == str(tmp_path / "package")
    assert found["graphs"]["target"]["matmuls"] == {"nvfp4": 21, "fp8": 30, "float": 12}
    assert found["graphs"]["target"]["layers"] == {"full_attention": 2, "linear_attention": 6}
    assert found["graphs"]["target"]["file"] == "model.onnx"
    assert found["graphs"]["target"]["nodes"] > 100
    assert found["graphs"]["mtp"]["matmuls"] == {"nvfp4": 0, "fp8": 1, "float": 8}
    data = "weights.data" if weights == "copy" else "transformed.data"
    assert found["weights"]["copied_bytes"] <= (tmp_path / "package" / data).stat().st_size
    assert (found["weights"]["linked_bytes"] == 0) == (weights == "copy")
    embedding, head = 2048 * 256 * 2, 2048 * 256 + 2048 * 4
    assert found["weights"]["shared_bytes"] == embedding + head
    assert found["weights"]["copied_bytes"] + found["weights"]["linked_bytes"] > found["weights"]["shared_bytes"]
    assert found["seconds"] > 0
    assert found["peak_rss_bytes"] > 1 << 20
    assert found["warnings"] == []


def test_export_without_a_head(tmp_path: Path) -> None:
    found = succeed("export", TRAINED, tmp_path / "package", "--mtp", "off")
    assert found["graphs"]["mtp"] is None
    assert not (tmp_path / "package" / "mtp.onnx").exists()
    line = refuse(2, "run", tmp_path / "package", "--token-ids", "1,2", "--draft-tokens", "1")
    assert "--draft-tokens: expected 0 to 0" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--block-size", "48"], "--block-size: expected a power of two, 16 or more, found 48"),
        (["--block-size", "8"], "found 8"),
        (["--max-draft-tokens", "8"], "--max-draft-tokens: expected 1 to 7, found 8"),
        (["--max-draft-tokens", "0"], "found 0"),
        (["--max-batch-size", "0"], "--max-batch-size: expected 1 to 256, found 0"),
        (["--context-length", "4097"], "--context-length: expected 1 to 4096"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_export_refuses_impossible_options(tmp_path: Path, arguments: list[str], words: str) -> None:
    assert words in refuse(2, "export", TRAINED, tmp_path / "package", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_export_refuses_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "out" / "package"
    assert "no such folder" in refuse(2, "export", tmp_path / "absent", out)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json: expected a file" in refuse(2, "export", empty, out)
    (empty / "config.json").write_text('{"model_type": "llama"}')
    assert "expected one .safetensors file" in refuse(2, "export", empty, out)
    shutil.copy(TRAINED / "model_mtp.safetensors", empty)
    line = refuse(2, "export", empty, out)
    assert "model_type: expected one of qwen3_5, qwen3_5_text, qwen3_5_moe, qwen3_5_moe_text, found 'llama'" in line
    assert not out.parent.exists()


def test_export_refuses_a_truncated_shard(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(TRAINED, checkpoint)
    shard = checkpoint / "model_backbone.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    line = refuse(2, "export", checkpoint, tmp_path / "package")
    assert "model_backbone.safetensors tensor" in line
    assert "it is cut short" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_an_existing_package_needs_force(tmp_path: Path) -> None:
    out = tmp_path / "package"
    succeed("export", TRAINED, out)
    (out / "mine").write_text("keep me")
    assert "pass --force to replace a package" in refuse(2, "export", TRAINED, out)
    assert (out / "mine").exists()
    succeed("export", TRAINED, out, "--force")
    assert not (out / "mine").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["package"]


def test_usage_errors_exit_2(package: Path) -> None:
    assert invoke("export", TRAINED).exit_code == 2
    assert invoke("run", package, "--no-such-option").exit_code == 2
    assert "one of --prompt, --chat" in refuse(2, "run", package)
    assert "found --prompt and --chat" in refuse(2, "run", package, "--prompt", "a", "--chat", "b")


def test_run_is_plain_unless_asked(package: Path, answers: Mapping[str, Any]) -> None:
    """Case A42."""
    found = succeed("run", package, "--token-ids", ids(answers["prompt_0"]))
    request = found["requests"][0]
    assert request["token_ids"] == answers["greedy_0"].tolist()
    assert request["finish_reason"] == "length"
    assert request["drafts_proposed"] == found["stats"]["draft_tokens_proposed"] == 0
    assert found["stats"]["draft_forward_passes"] == 0
    assert set(found["stats"]) >= STATS
    assert found["tokens_per_second"] == pytest.approx(64 / found["seconds"])


def test_run_with_drafts(package: Path, answers: Mapping[str, Any]) -> None:
    found = succeed("run", package, "--token-ids", ids(answers["prompt_0"]), "--draft-tokens", 3)
    request = found["requests"][0]
    assert request["token_ids"] == answers["greedy_0"].tolist()
    assert (request["drafts_accepted"], request["drafts_evaluated"]) == (36, 54)


@pytest.mark.parametrize(
    ("option", "nothing"),
    [
        ("--cuda-graph", "nothing is recorded on a CPU"),
        ("--unpacked-weights", "nothing is unpacked on a CPU, or where nothing is quantized"),
    ],
)
def test_what_is_for_a_gpu_is_said_to_do_nothing_on_a_cpu(package: Path, option: str, nothing: str) -> None:
    options = ("run", package, "--token-ids", "1,2", "--max-new-tokens", 2, "--ep", "cpu", "--json")
    warning = f"build-model: warning: {option}: {nothing}"
    plain, asked = invoke(*options), invoke(*options, option)
    assert warning in asked.stderr.splitlines() and warning not in plain.stderr.splitlines()
    assert json.loads(asked.stdout)["requests"] == json.loads(plain.stdout)["requests"]


def test_prompt_and_text(package: Path, answers: Mapping[str, Any]) -> None:
    """The tokenizer library itself says what prompt 0's tokens and the generated text are."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TRAINED / "tokenizer.json"))
    prompt = tokenizer.decode(answers["prompt_0"].tolist())
    found = succeed("run", package, "--prompt", prompt)["requests"][0]
    assert found["token_ids"] == answers["greedy_0"].tolist()
    assert found["text"] == tokenizer.decode(answers["greedy_0"].tolist())
    shown = invoke("run", package, "--prompt", prompt, "--max-new-tokens", 8)
    assert shown.stdout == tokenizer.decode(answers["greedy_0"].tolist()[:8]) + "\n"
    assert "8 tokens" in shown.stderr
    assert "no drafts" in shown.stderr


def test_chat_uses_the_template(package: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TRAINED / "tokenizer.json"))
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    plain = succeed("run", package, "--token-ids", ids(tokenizer.encode(text).ids), "--max-new-tokens", 8)
    chat = succeed("run", package, "--chat", "hello", "--max-new-tokens", 8)
    assert chat["requests"][0]["token_ids"] == plain["requests"][0]["token_ids"]


def test_a_stop_id_is_kept_in_tokens_but_not_in_text(package: Path, tmp_path: Path, answers: Mapping[str, Any]) -> None:
    shutil.copytree(package, tmp_path / "package")
    path = tmp_path / "package" / "genai_config.json"
    config = json.loads(path.read_text())
    stop = answers["greedy_0"].tolist()[5]
    config["model"]["eos_token_id"] = [stop]
    path.write_text(json.dumps(config))
    request = succeed("run", tmp_path / "package", "--token-ids", ids(answers["prompt_0"]))["requests"][0]
    first = answers["greedy_0"].tolist().index(stop)
    assert request["token_ids"] == answers["greedy_0"].tolist()[: first + 1]
    assert request["finish_reason"] == "stop"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TRAINED / "tokenizer.json"))
    assert request["text"] == tokenizer.decode(answers["greedy_0"].tolist()[:first])


def test_without_a_tokenizer_token_ids_work_and_text_is_null(tmp_path: Path) -> None:
    out = tmp_path / "package"
    succeed("export", CHECKPOINTS / "mo_w4a8nvfp4_dense_text", out)
    request = succeed("run", out, "--token-ids", "5,6,7", "--max-new-tokens", 2)["requests"][0]
    assert request["text"] is None
    assert len(request["token_ids"]) == 2
    assert "expected tokenizer.json, found none" in refuse(2, "run", out, "--prompt", "x")


def test_a_seed_gives_one_text_whatever_is_drafted(package: Path, answers: Mapping[str, Any]) -> None:
    """Sampling follows seed and position alone, so it is the same text with drafts from the head, the text, or none."""
    asked = ("run", package, "--token-ids", ids(answers["prompt_0"]), "--temperature", 0.8, "--top-k", 50)
    plain = succeed(*asked, "--top-p", 0.95, "--seed", 7)["requests"][0]
    assert plain["token_ids"] != answers["greedy_0"].tolist()
    for proposer in ("mtp", "ngram"):
        drafts = ("--top-p", 0.95, "--draft-tokens", 3, "--proposer", proposer)
        drafted = succeed(*asked, *drafts, "--seed", 7)["requests"][0]
        assert drafted["token_ids"] == plain["token_ids"]
        assert drafted["drafts_proposed"] > 0
    assert succeed(*asked, "--top-p", 0.95, "--seed", 8)["requests"][0]["token_ids"] != plain["token_ids"]


def test_drafts_from_the_text_itself(package: Path, answers: Mapping[str, Any]) -> None:
    """The prompt holds what will be generated, and no head runs."""
    known = [*answers["prompt_0"].tolist(), *answers["greedy_0"].tolist()]
    asked = ("run", package, "--token-ids", ids(known * 2), "--max-new-tokens", 20)
    plain = succeed(*asked)["requests"][0]
    found = succeed(*asked, "--draft-tokens", 3, "--proposer", "ngram")
    assert found["requests"][0]["token_ids"] == plain["token_ids"]
    assert found["stats"]["draft_tokens_proposed"] > 0
    assert found["stats"]["draft_forward_passes"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temperature", "-1"), "--temperature: expected a number from 0 to 1000000.0, found -1.0"),
        (("--temperature", "nan"), "--temperature: expected a number from 0"),
        (("--top-p", "0"), "--top-p: expected a number from 1e-09 to 1"),
        (("--top-k", "-3"), "--top-k: expected a whole number from 0"),
        (("--seed", "-1"), "--seed: expected a whole number from 0 to"),
    ],
)
def test_impossible_sampling_is_refused(package: Path, options: tuple[str, ...], message: str) -> None:
    assert message in refuse(2, "run", package, "--token-ids", "1", *options)


def test_a_line_has_sampling_of_its_own(package: Path, tmp_path: Path, answers: Mapping[str, Any]) -> None:
    """A line with a penalty is decoded without drafts, and says so; the others go on drafting."""
    prompt = {"token_ids": answers["prompt_0"].tolist(), "draft_tokens": 3, "max_new_tokens": 16}
    own = [{}, {"temperature": 0.9, "seed": 3}, {"repetition_penalty": 1.5}, {"min_new_tokens": 4}]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(json.dumps(prompt | line) for line in own))
    found = succeed("run", package, "--requests", path)["requests"]
    assert [request["drafting_off"] for request in found] == [None, None, "repetition_penalty", "min_new_tokens"]
    assert [request["drafts_proposed"] > 0 for request in found] == [True, True, False, False]
    assert found[0]["token_ids"] == answers["greedy_0"].tolist()[:16] == found[3]["token_ids"]
    assert found[1]["token_ids"] != found[0]["token_ids"] != found[2]["token_ids"]
    assert [request["stats"]["draft_tokens_proposed"] for request in found] == [r["drafts_proposed"] for r in found]
    path.write_text(json.dumps(prompt | {"top_p": 2}))
    assert "line 1: --top-p: expected a number from 1e-09 to 1, found 2.0" in refuse(
        2, "run", package, "--requests", path
    )


def test_dense_checkpoints(package: Path, tmp_path: Path, answers: Mapping[str, Any]) -> None:
    """Exported, verified against transformers' answers, and run as a compact package is."""
    dense = tmp_path / "dense"
    succeed("export", TRAINED, dense, "--checkpoints", "dense")
    found = succeed("verify", dense, "--reference", TRAINED / "reference.npz", "--min-acceptance", 0.6)
    assert found["ok"]
    details = {check["name"]: check["detail"] for check in found["checks"]}
    assert details["manifest state groups"] == details["checkpoints model.onnx"] == "4 checkpoints of 6 layers"
    ids = ",".join(map(str, answers["prompt_0"].tolist()))
    both = [succeed("run", folder, "--token-ids", ids, "--draft-tokens", 3) for folder in (package, dense)]
    tokens, accepted = ([run["requests"][0][key] for run in both] for key in ("token_ids", "drafts_accepted"))
    assert tokens == [answers["greedy_0"].tolist()] * 2
    assert accepted[0] == accepted[1] > 0
    assert both[1]["requests"][0]["token_ids"] == answers["greedy_0"].tolist()
    assert succeed("inspect", dense)["checkpoint_count"] == 4 and succeed("inspect", package)["checkpoint_count"] == 0


@pytest.mark.parametrize("drafts", [0, 3])
def test_requests_file(package: Path, tmp_path: Path, answers: Mapping[str, Any], drafts: int) -> None:
    lines = [
        {"token_ids": answers[f"prompt_{i}"].tolist(), "max_new_tokens": 10 + i, "arrive_at_step": (5 * i) % 7}
        for i in range(8)
    ]
    lines[3]["draft_tokens"] = 1
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = succeed("run", package, "--requests", path, "--draft-tokens", drafts, "--max-batch-size", 3)
    assert [r["token_ids"] for r in found["requests"]] == [answers[f"greedy_{i}"].tolist()[: 10 + i] for i in range(8)]
    assert [r["drafts_proposed"] > 0 for r in found["requests"]] == [drafts > 0 or i == 3 for i in range(8)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "line 1"),
        ('{"token_ids": [1], "prompt": "x"}', "either token_ids or prompt"),
        ('{"max_new_tokens": 3}', "either token_ids or prompt"),
        ('{"token_ids": [1], "surprise": 1}', "line 1 surprise"),
        ('{"token_ids": ["1"]}', "token_ids.0"),
        ('{"token_ids": [99999]}', "token ids below 2048, found 99999"),
        ('{"token_ids": [1], "draft_tokens": 4}', "--draft-tokens: expected 0 to 3"),
        ('{"token_ids": [1], "max_new_tokens": 0}', "line 1: --max-new-tokens: expected 1 or more"),
        ('{"token_ids": [1], "arrive_at_step": -1}', "line 1 arrive_at_step"),
        ("", "at least one request"),
    ],
)
def test_bad_request_lines_are_named(package: Path, tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(line + "\n")
    assert words in refuse(2, "run", package, "--requests", path)


def test_run_refusals(package: Path, tmp_path: Path) -> None:
    for given in (["--token-ids", "1"], ["--prompt", "x"], ["--chat", "x"]):
        assert "expected a package folder" in refuse(2, "run", tmp_path / "absent", *given)
    assert "found 1,x" in refuse(2, "run", package, "--token-ids", "1,x")
    assert "expected 0 to 3" in refuse(2, "run", package, "--token-ids", "1", "--draft-tokens", 4)
    assert "found -1" in refuse(2, "run", package, "--token-ids", "1", "--draft-tokens", -1)
    assert "--num-blocks: expected 5 blocks of 16 tokens for this request, found 2" in refuse(
        2, "run", package, "--token-ids", ids(range(1, 11)), "--num-blocks", 2, "--block-size", 16
    )
    assert "--block-size: expected 1 or more" in refuse(2, "run", package, "--token-ids", "1", "--block-size", 0)
    assert "--requests" in refuse(2, "run", package, "--requests", tmp_path / "absent.jsonl")


def test_cuda_is_the_machines_fault(package: Path) -> None:
    assert "--ep cuda" in refuse(3, "run", package, "--token-ids", "1", "--ep", "cuda")


def test_damaged_package_is_refused(package: Path, tmp_path: Path) -> None:
    shutil.copytree(package, tmp_path / "package")
    (tmp_path / "package" / "mtp.onnx").unlink()
    assert "mtp.onnx: expected a graph file" in refuse(2, "run", tmp_path / "package", "--token-ids", "1")
    (tmp_path / "package" / "mtp.onnx").write_bytes(b"\x08")
    assert "mtp.onnx" in refuse(2, "inspect", tmp_path / "package")


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_missing_weights_are_named(package: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(package, tmp_path / "package")
    data = tmp_path / "package" / "weights.data"
    size = data.stat().st_size
    if damage == "missing":
        data.unlink()
    else:
        os.truncate(data, size - 1)
    for command in (["inspect"], ["run", "--token-ids", "1"]):
        line = refuse(2, command[0], tmp_path / "package", *command[1:])
        assert "weights.data: expected at least" in line
        assert ("no such file" if damage == "missing" else f"found {size - 1} bytes") in line


def test_weights_that_are_no_numbers_fail(package: Path, tmp_path: Path) -> None:
    shutil.copytree(package, tmp_path / "package")
    data = tmp_path / "package" / "weights.data"
    data.write_bytes(b"\xff" * data.stat().st_size)
    assert "the logits are not numbers" in refuse(1, "run", tmp_path / "package", "--token-ids", "1")


def test_graphs_of_different_models_are_refused(package: Path, tmp_path: Path) -> None:
    shutil.copytree(package, tmp_path / "package")
    succeed("export", CHECKPOINTS / "mo_w4a8nvfp4_dense_text", tmp_path / "other")
    shutil.copy(tmp_path / "other" / "mtp.onnx", tmp_path / "package")
    assert "mtp.onnx vocab_size: expected 2048, found 512" in refuse(2, "inspect", tmp_path / "package")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("model.vocab_size", 0, "vocab_size: expected an integer from 1"),
        ("model.vocab_size", 9999, "model.onnx vocab_size: expected 9999, found 2048"),
        ("model.context_length", 5000, "context_length: expected at most 4096, the positions of model.onnx"),
        ("model.eos_token_id", {}, "eos_token_id: expected an integer"),
        ("model.eos_token_id", [-1], "eos_token_id: expected an integer from 0 to 2047, found -1"),
        ("model.decoder.state_update_capacity", 2, "state_update_capacity: expected 2, found 4"),
        ("model.decoder.state_update_capacity", 1.5, "state_update_capacity: expected an integer"),
        ("model.decoder.state_groups.2.state_update.key_head_count", 3, "key_head_count"),
        ("model.decoder.state_groups.0.layer_ids", [3, 7, 7], "layer_ids: expected distinct ids"),
        ("engine.dynamic_batching.block_size", True, "block_size: expected an integer"),
        ("speculative.max_draft_tokens", 7, "max_draft_tokens: expected less than state_update_capacity 4, found 7"),
    ],
)
def test_edited_numbers_are_refused(package: Path, tmp_path: Path, path: str, value: Any, words: str) -> None:
    shutil.copytree(package, tmp_path / "package")
    file = tmp_path / "package" / "genai_config.json"
    config = json.loads(file.read_text())
    *parents, last = path.split(".")
    place = config
    for key in parents:
        place = place[int(key) if key.isdigit() else key]
    place[last] = value
    file.write_text(json.dumps(config))
    assert words in refuse(2, "run", tmp_path / "package", "--token-ids", "1")


@pytest.mark.parametrize("content", ["[]", '{"version": 5}', "x"])
def test_token_ids_do_not_need_the_tokenizer(package: Path, tmp_path: Path, content: str) -> None:
    shutil.copytree(package, tmp_path / "package")
    (tmp_path / "package" / "tokenizer.json").write_text(content)
    result = invoke("run", tmp_path / "package", "--token-ids", "1", "--max-new-tokens", 2, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["requests"][0]["text"] is None
    assert result.stderr.count("\n") == 1
    assert "warning: no text" in result.stderr
    assert invoke("run", tmp_path / "package", "--prompt", "x").exit_code == 2


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{% bad", "{{ raise_exception('no') }}"])
def test_a_bad_chat_template_is_refused(package: Path, tmp_path: Path, template: str) -> None:
    shutil.copytree(package, tmp_path / "package")
    (tmp_path / "package" / "chat_template.jinja").write_text(template)
    assert "chat template: expected one that renders" in refuse(2, "run", tmp_path / "package", "--chat", "x")


def test_odd_token_ids_and_text_are_refused(package: Path) -> None:
    for odd in ("1_0", "\u0661", "", "1,,2", "-1", "0x1"):
        assert "--token-ids: expected integers" in refuse(2, "run", package, f"--token-ids={odd}")
    assert "token ids below 2048" in refuse(2, "run", package, "--token-ids", "9" * 40)
    assert "expected text in UTF-8" in refuse(2, "run", package, "--prompt", "\udcff")
    assert "at least one token" in refuse(2, "run", package, "--prompt", "")


def test_a_late_arrival_is_not_waited_for(package: Path, tmp_path: Path, answers: Mapping[str, Any]) -> None:
    """Steps in which nobody is there are skipped, and a separator that JSON allows in text ends no line."""
    path = tmp_path / "requests.jsonl"
    line = {"token_ids": answers["prompt_0"].tolist(), "max_new_tokens": 3, "arrive_at_step": 10**12}
    path.write_text(json.dumps(line) + "\n" + json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False) + "\r\n", "utf-8")
    found = succeed("run", package, "--requests", path, "--max-new-tokens", 2)
    assert found["requests"][0]["token_ids"] == answers["greedy_0"].tolist()[:3]
    assert len(found["requests"][1]["token_ids"]) == 2


def test_quiet_is_quiet(package: Path) -> None:
    assert invoke("run", package, "--token-ids", "1", "--max-new-tokens", 1, "-q").stderr == ""


def test_a_full_stdout_is_the_machines_fault() -> None:
    command = [Path(sys.executable).with_name("build-model"), "inspect", TRAINED, "--json"]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 3
    assert result.stderr == "build-model: stdout: No space left on device; the result could not be written\n"


def test_a_terminated_export_leaves_nothing(tmp_path: Path) -> None:
    """A stop signal in the middle of writing takes the half-written package with it."""
    code = (
        "import os, signal, sys, cli\nfrom builder import package\n"
        "package.reader.read = lambda folder: os.kill(os.getpid(), signal.SIGTERM)\n"
        "cli.main(sys.argv[1:])"
    )
    arguments = [sys.executable, "-c", code, "export", str(TRAINED), str(tmp_path / "out")]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.returncode == 128 + 15
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_dump(package: Path, tmp_path: Path, answers: Mapping[str, Any]) -> None:
    path = tmp_path / "dump.npz"
    arguments = ["--token-ids", ids(answers["prompt_1"]), "--draft-tokens", 3, "--max-new-tokens", 1, "--dump", path]
    succeed("run", package, *arguments, "--max-scheduled-tokens", 5)
    found = np.load(path)
    length = len(answers["prompt_1"])
    shapes = {
        "logits": (length, 2048),
        "hidden_states": (length, 256),
        "mtp_logits": (length, 2048),
        "mtp_draft_tokens": (3,),
        "mtp_draft_logits": (3, 2048),
    }
    assert {name: found[name].shape for name in found.files} == shapes
    np.testing.assert_allclose(found["logits"], answers["logits_1"][0], rtol=0, atol=2e-3)
    assert found["mtp_draft_tokens"].tolist() == answers["mtp_draft_tokens_1"].tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["dump.npz"]


def test_dump_is_of_one_request(package: Path, tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"token_ids": [1]}\n{"token_ids": [2]}\n')
    assert "--dump: expected one request" in refuse(2, "run", package, "--requests", requests, "--dump", tmp_path / "x")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("absent/x.npz", "expected a file in a folder that exists"),
        ("file/x.npz", "a file in a folder that exists"),
        (".", "expected the name of a file"),
        ("folder", "expected the name of a file"),
        ("link", "expected the name of a file"),
        ("x" * 300, "expected a usable path, found File name too long"),
    ],
)
def test_dump_replaces_nothing_but_files(package: Path, tmp_path: Path, target: str, words: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert words in refuse(2, "run", package, "--token-ids", "1", "--max-new-tokens", 1, "--dump", tmp_path / target)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("length", [4092, 4096])
def test_dump_needs_room_behind_the_prompt(package: Path, tmp_path: Path, length: int) -> None:
    arguments = ["--token-ids", ids([5] * length), "--draft-tokens", 3, "--dump", tmp_path / "x"]
    assert f"room for 5 tokens behind the prompt, found {4096 - length}" in refuse(2, "run", package, *arguments)


def test_inspect_checkpoint() -> None:
    found = succeed("inspect", CHECKPOINTS / "ct_mixed_dense_vl")
    assert found["kind"] == "checkpoint"
    assert found["mtp"] is True
    assert found["formats"] == {"fp8": 17, "nvfp4": 9, "float": 14}
    assert found["skipped_tensors"]["vision"] > 0
    assert len(found["modules"]) == 40
    shown = invoke("inspect", CHECKPOINTS / "ct_mixed_dense_vl")
    assert "mtp.self_attn.q_proj" in shown.stdout


def test_inspect_package(package: Path) -> None:
    found = succeed("inspect", package)
    assert found["kind"] == "package"
    assert found["layers"] == {"full_attention": 2, "linear_attention": 6}
    assert found["max_draft_tokens"] == 3
    assert found["eos_token_ids"] == [0]
    assert "full_attention" in invoke("inspect", package).stdout


def test_debug_shows_a_traceback(tmp_path: Path) -> None:
    result = invoke("--debug", "inspect", tmp_path / "absent")
    assert result.exit_code == 1
    assert isinstance(result.exception, Exception)


def test_refusals_reach_the_shell(tmp_path: Path) -> None:
    """The installed command itself: exit code, stderr, no traceback."""
    command = Path(sys.executable).with_name("build-model")
    result = subprocess.run([command, "inspect", tmp_path / "absent"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1
