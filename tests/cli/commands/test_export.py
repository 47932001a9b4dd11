"""``grpo-pl export`` of a real run, to a folder and to a server that speaks the hub's protocol."""

import base64
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from grpo_pl.cli.commands.export import export
from grpo_pl.cli.main import main

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def run(command_line: Any) -> Path:
    command_line.done("fit", "--config", command_line.config())
    return Path(command_line.runs / "tiny")


def test_every_export_of_a_run_has_a_card_with_its_figures(run: Path, tmp_path: Path) -> None:
    at_the_end = ModelCard.load(run / "export" / "README.md")
    assert at_the_end.data.model_name == "tiny"
    results = {result.metric_name: result.metric_value for result in at_the_end.data.eval_results or []}
    assert {"pass@1", "greedy"} <= results.keys()
    assert "| rollouts | 4 |" in at_the_end.text
    with contextlib.redirect_stdout(io.StringIO()):
        export(run / "checkpoints" / "rollout-000002.ckpt", tmp_path / "out", license="mit")
    earlier = ModelCard.load(tmp_path / "out" / "README.md")
    assert "| rollouts | 2 |" in earlier.text
    assert (earlier.data.license, at_the_end.data.license) == ("mit", None)


def test_a_dry_run_prints_the_card_and_writes_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--push-to-hub", "me/sums", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    card, _, told = printed.rpartition("\n(dry run: ")
    assert ModelCard(card).data.model_name == "sums"
    assert told == f"would write {tmp_path / 'out'} and upload it to a private me/sums)\n"
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_pushed_is_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--push-to-hub", "sums"]) == 1
    assert "'sums' is no repository: give owner/name" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["export", str(run), str(tmp_path / "out"), "--push-to-hub", "me/sums"]) == 1  # tests are offline
    assert "is written, but was not uploaded to me/sums: " in capsys.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").is_file()


class Hub(ThreadingHTTPServer):
    """A server that takes uploads as the hub does: small files in the commit, large ones by Git LFS."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _say(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        assert urlsplit(self.path).path == "/api/models/me/sums/tree/main", self.path
        self._say([{"type": "file", "path": p, "size": len(d), "oid": "0" * 40} for p, d in self.server.files.items()])

    def do_PUT(self) -> None:
        data = self._body()
        self.server.objects[hashlib.sha256(data).hexdigest()] = data
        self._say({})

    def do_POST(self) -> None:
        hub, path, body = self.server, urlsplit(self.path).path, self._body()
        hub.tokens.add(self.headers.get("Authorization"))
        if path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self._say({"url": f"{hub.url}/me/sums", "id": "1", "name": "me/sums"})
        elif path == "/api/validate-yaml":
            self._say({"errors": [], "warnings": []})
        elif path == "/api/models/me/sums/preupload/main":
            modes = {True: "lfs", False: "regular"}
            files = [
                {"path": f["path"], "uploadMode": modes[f["path"].endswith(".safetensors")], "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            self._say({"files": files})
        elif path == "/me/sums.git/info/lfs/objects/batch":
            objects = [
                {**o, "actions": {"upload": {"href": f"{hub.url}/lfs/{o['oid']}"}}} for o in json.loads(body)["objects"]
            ]
            self._say({"transfer": "basic", "objects": objects})
        elif path == "/api/models/me/sums/commit/main":
            for line in body.splitlines():
                self._commit(**json.loads(line))
            self._say({"commitUrl": f"{hub.url}/me/sums/commit/1", "commitOid": "1"})
        else:
            self._say({"error": f"unknown: {unquote(self.path)}"}, 404)

    def _commit(self, key: str, value: dict[str, Any]) -> None:
        if key == "file":
            self.server.files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            self.server.files[value["path"]] = self.server.objects[value["oid"]]
        elif key == "deletedFile":
            del self.server.files[value["path"]]

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_the_hub_gets_every_file_and_loses_earlier_weights(run: Path, tmp_path: Path, hub: Hub) -> None:
    hub.files = {"model-00001-of-00002.safetensors": b"old", "notes.txt": b"theirs"}
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "grpo_pl", "export", str(run), str(tmp_path / "out"), "--push-to-hub", "me/sums"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(tmp_path / "out"), f"{hub.url}/me/sums/commit/1"]
    (created,) = hub.created
    assert (created["organization"], created["name"], created["visibility"]) == ("me", "sums", "private")
    assert hub.tokens == {"Bearer hf_secret"}
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.files == {**written, "notes.txt": b"theirs"}
    assert ModelCard(hub.files["README.md"].decode()).data.model_name == "sums"
    assert load_file(tmp_path / "out" / "model.safetensors")
