"""A checkpoint from the Hub, against a small server that speaks as much of its protocol as a download needs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyFactory

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "somebody/tiny-qwen"
UNWANTED = ("modeling_evil.py", "pytorch_model.bin", "README.md", "original/consolidated.safetensors")


@dataclass
class Hub:
    """Files of one repository, and which of them were asked for."""

    files: dict[str, bytes]
    status: int = 200
    error: str = ""
    asked: list[str] = field(default_factory=list)
    endpoint: str = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if self.status != 200:
            return self.status, {"X-Error-Code": self.error, "X-Error-Message": "no"}, b"{}"
        if re.fullmatch(rf"/api/models/{REPOSITORY}/(revision|tree)/[^/?]+(\?.*)?", path):
            if "/nowhere" in path:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            return 200, {"Content-Type": "application/json"}, self._listing("/tree/" in path)
        found = re.fullmatch(rf"/{REPOSITORY}/resolve/{COMMIT}/(.+)", path)
        if not found or found[1] not in self.files:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        self.asked.append(found[1])
        return 200, self._headers(found[1]), self.files[found[1]]

    def _listing(self, tree: bool) -> bytes:
        if tree:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
            return json.dumps(entries).encode()
        siblings = [{"rfilename": name} for name in self.files]
        return json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}).encode()

    def _headers(self, name: str) -> dict[str, str]:
        """Large files are named by SHA-256, the others by git's SHA-1."""
        data = self.files[name]
        digest = hashlib.sha256(data) if name.endswith(".safetensors") else hashlib.sha1(data)
        return {"ETag": f'"{digest.hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}


@pytest.fixture
def hub(tiny: TinyFactory) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in tiny("modelopt").iterdir()}
    files["chat_template.jinja"] = b"{{ messages }}"
    files |= dict.fromkeys(UNWANTED, b"never fetched")
    served = Hub(files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = served.answer(self.path)
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *arguments: Any) -> None:
            """The tests' output stays clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    served.endpoint = f"http://127.0.0.1:{server.server_port}"
    yield served
    server.shutdown()
    server.server_close()


def export(
    hub: Hub, home: Path, *arguments: str, command: str = "export", **environment: str
) -> subprocess.CompletedProcess[str]:
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1", **environment}
    words = [command, REPOSITORY, *([str(home / "out")] if command == "export" else []), *arguments]
    program = "import sys; from cli import main; sys.argv[0] = 'build-model'; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**{key: value for key, value in os.environ.items() if not key.startswith("HF_")}, **settings},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_hub_id_is_fetched_and_linked_into_its_cache(hub: Hub, tmp_path: Path) -> None:
    done = export(hub, tmp_path, "--json", "-q")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["weights"]["linked_bytes"] > 0
    assert not set(hub.asked) & set(UNWANTED)
    shard = tmp_path / "out" / "model.safetensors"
    digest = hashlib.sha256(hub.files["model.safetensors"]).hexdigest()
    (blob,) = (tmp_path / "hf").rglob(f"blobs/{digest}")
    assert blob.stat().st_ino == shard.stat().st_ino
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text("utf-8"))
    source = manifest["source"]
    assert (source["kind"], source["name"], source["revision"]) == ("hub", REPOSITORY, COMMIT)
    assert source["shards"]["model.safetensors"]["digest"] == f"sha256:{digest}"
    assert manifest["files"]["model.safetensors"]["digest"] == f"sha256:{digest}"
    assert REPOSITORY in (tmp_path / "out" / "README.md").read_text("utf-8")


def test_what_is_cached_needs_no_network(hub: Hub, tmp_path: Path) -> None:
    assert export(hub, tmp_path, "-q").returncode == 0
    first = (tmp_path / "out" / "manifest.json").read_bytes()
    asked = len(hub.asked)
    again = export(hub, tmp_path, "-q", "--force", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert len(hub.asked) == asked and (tmp_path / "out" / "manifest.json").read_bytes() == first


def test_plan_takes_a_hub_id_too(hub: Hub, tmp_path: Path) -> None:
    done = export(hub, tmp_path, "--json", "--revision", "main", command="plan")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["graphs"]["target"]["layers"] == {"full_attention": 1, "linear_attention": 3}


@pytest.mark.parametrize(
    ("status", "error", "code", "line"),
    [
        (401, "GatedRepo", 2, "expected one you may read, found a gated repository; accept its terms and run"),
        (403, "GatedRepo", 2, "expected one you may read, found a gated repository; accept its terms and run"),
        (
            404,
            "RepoNotFound",
            2,
            "expected a checkpoint folder or a Hub id, found no such folder and no such repository",
        ),
        (500, "", 3, "cannot be"),
    ],
)
def test_what_cannot_be_had_is_one_clear_line(
    hub: Hub, tmp_path: Path, status: int, error: str, code: int, line: str
) -> None:
    hub.status, hub.error = status, error
    done = export(hub, tmp_path)
    assert done.returncode == code
    assert re.fullmatch(rf"build-model: {REPOSITORY}: .*{re.escape(line)}.*\n", done.stderr), done.stderr
    assert not (tmp_path / "out").exists()


def test_a_revision_that_is_not_there_is_named(hub: Hub, tmp_path: Path) -> None:
    done = export(hub, tmp_path, "--revision", "nowhere")
    assert done.returncode == 2
    assert "--revision: expected a branch, tag or commit, found nowhere" in done.stderr


def test_without_a_network_it_says_so(hub: Hub, tmp_path: Path) -> None:
    done = export(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 3
    assert f"build-model: {REPOSITORY}: no such folder, and the Hub cannot be reached" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["nowhere", "/no/where", "a/b/c", "./a/b", "../a", "somebody/..", "spät/er"])
def test_what_is_neither_folder_nor_id_is_refused_unasked(tmp_path: Path, name: str) -> None:
    from builder.errors import Refused
    from builder.hub import checkpoint_folder

    with pytest.raises(Refused, match=r"expected a checkpoint folder or a Hub id \(owner/name\), found no such folder"):
        checkpoint_folder(name)


def test_a_mistyped_path_below_a_folder_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from builder.errors import Refused
    from builder.hub import checkpoint_folder

    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(Refused, match="checkpoints/typo: expected a checkpoint folder"):
        checkpoint_folder("checkpoints/typo")


def test_a_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    from builder.errors import Refused
    from builder.hub import checkpoint_folder

    with pytest.raises(Refused, match="--revision: expected a Hub id, found the folder"):
        checkpoint_folder(tmp_path, "main")
