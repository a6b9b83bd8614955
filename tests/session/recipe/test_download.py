"""`trainspec get` against a small server that speaks the endpoints of the Hub, with real interruptions."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.core.errors import MachineError, RecipeError, TrainspecError
from trainspec_cli.core.reading.hub_cache import HubName
from trainspec_cli.data.huggingface.safetensors import INDEX, make_header
from trainspec_cli.session.recipe import download

pytest.importorskip("huggingface_hub")
NAME = "org/tiny"
TOKEN = "hf_secret_of_a_test"
COMMIT = "c" * 40


def weights(name: str, count: int) -> bytes:
    return make_header({name: ("F32", (count,))}) + bytes(range(256)) * (count // 64)


FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    INDEX: json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode(),
    "model-1.safetensors": weights("a", 2**18),
    "model-2.safetensors": weights("b", 2**18),
    "pytorch_model.bin": b"a pickle",
    "modeling_tiny.py": b"raise SystemExit",
    "consolidated.safetensors": b"the same again",
    "onnx/model.safetensors": b"elsewhere",
}
WANTED = ("config.json", "tokenizer.json", INDEX, "model-1.safetensors", "model-2.safetensors")


class Hub(ThreadingHTTPServer):
    """A server with one model."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files = dict(FILES)
        self.asked: list[tuple[str, str | None]] = []
        """(file, range) of each request for content."""
        self.tokens: set[str | None] = set()
        self.status: int | None = None
        """The status of every answer, instead of the content."""
        self.error_code = ""
        self.needs_token = False
        self.ignores_ranges = False
        self.cuts: list[int] = []
        """After how many bytes the next answers of weights end early."""
        self.pause_s = 0.0
        self.corrupts = False
        self.resized_by = 0
        """How much longer, or shorter, answers with weights are than the Hub says."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: Any) -> None:
        pass

    def refuse(self, status: int, code: str = "") -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        hub = self.server
        token = self.headers.get("Authorization")
        hub.tokens.add(token)
        if hub.status is not None:
            self.refuse(hub.status, hub.error_code)
        elif hub.needs_token and token != f"Bearer {TOKEN}":
            self.refuse(401, "GatedRepo" if hub.error_code == "GatedRepo" else "RepoNotFound")
        elif self.path.startswith(f"/api/models/{NAME}"):
            if "/revision/" in self.path and "/revision/main" not in self.path:
                self.refuse(404, "RevisionNotFound")
                return
            body = json.dumps(
                {"id": NAME, "sha": COMMIT, "siblings": [entry(*one) for one in hub.files.items()]}
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        elif self.path.startswith(f"/{NAME}/resolve/{COMMIT}/"):
            self.send_file(self.path.rpartition("/")[2].partition("?")[0])
        else:
            self.refuse(404, "RepoNotFound")

    def send_file(self, name: str) -> None:
        hub = self.server
        ranged = self.headers.get("Range")
        hub.asked.append((name, ranged))
        start = int(ranged.removeprefix("bytes=").removesuffix("-")) if ranged and not hub.ignores_ranges else 0
        content = hub.files[name][start:]
        if hub.corrupts and name.endswith(".safetensors"):
            content = content[:-1] + b"\x99"
        if hub.resized_by and name.endswith(".safetensors"):
            content = content[: hub.resized_by] if hub.resized_by < 0 else content + b"x" * hub.resized_by
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        end = hub.cuts.pop(0) if hub.cuts and name.endswith(".safetensors") else len(content)
        for at in range(0, end, 2**16):
            self.wfile.write(content[at : min(end, at + 2**16)])
            time.sleep(hub.pause_s)
        self.close_connection = end < len(content)


def entry(name: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    found: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": blob}
    if name.endswith(".safetensors"):
        digest = hashlib.sha256(content).hexdigest()
        found["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
    return found


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.delenv(download.TOKEN, raising=False)
    monkeypatch.setattr(download, "WAIT_S", 0.0)
    yield server
    server.shutdown()
    server.server_close()


def fetch(folder: Path, **options: Any) -> download.Fetched:
    return download.fetch(HubName(NAME), folder, lambda *_: None, **options)


def refused(folder: Path, named: str = NAME, revision: str = "main") -> TrainspecError:
    with pytest.raises(TrainspecError) as raised:
        download.fetch(HubName(named, revision), folder, lambda *_: None)
    return raised.value


def test_only_files_that_run_no_code_arrive_and_a_second_call_receives_nothing(hub: Hub, tmp_path: Path) -> None:
    fetched = fetch(tmp_path / "tiny")
    assert {file.name: file.read_bytes() for file in (tmp_path / "tiny").iterdir()} == {
        name: FILES[name] for name in WANTED
    }
    assert (fetched.commit, fetched.received_bytes) == (COMMIT, sum(len(FILES[name]) for name in WANTED))
    asked = len(hub.asked)
    assert fetch(tmp_path / "tiny").received_bytes == 0
    assert len(hub.asked) == asked
    fetch(tmp_path / "tiny", code=True)
    assert (tmp_path / "tiny/modeling_tiny.py").is_file()
    assert not (tmp_path / "tiny/pytorch_model.bin").exists()


def test_a_lost_connection_is_continued_at_the_byte_reached(hub: Hub, tmp_path: Path) -> None:
    hub.cuts = [300_000, 100_000]
    fetched = fetch(tmp_path)
    ranges = [ranged for name, ranged in hub.asked if name == "model-1.safetensors"]
    assert ranges[0] is None and len(ranges) == 3
    begins = [int(one.removeprefix("bytes=").removesuffix("-")) for one in ranges[1:] if one]
    assert 0 < begins[0] <= 300_000 and begins[0] < begins[1] <= begins[0] + 100_000
    assert fetched.received_bytes == sum(len(FILES[name]) for name in WANTED)
    assert (tmp_path / "model-1.safetensors").read_bytes() == FILES["model-1.safetensors"]


def test_a_server_without_ranges_sends_the_file_again(hub: Hub, tmp_path: Path) -> None:
    hub.cuts, hub.ignores_ranges = [300_000], True
    fetch(tmp_path)
    assert (tmp_path / "model-1.safetensors").read_bytes() == FILES["model-1.safetensors"]


def test_a_file_that_changed_on_disk_is_downloaded_again(hub: Hub, tmp_path: Path) -> None:
    fetch(tmp_path)
    (tmp_path / "model-2.safetensors").write_bytes(FILES["model-1.safetensors"])
    assert fetch(tmp_path).received_bytes == len(FILES["model-2.safetensors"])


def test_other_content_than_stated_is_deleted(hub: Hub, tmp_path: Path) -> None:
    hub.corrupts = True
    error = refused(tmp_path)
    assert isinstance(error, MachineError) and error.problems[0].code == "bad_checkpoint"
    assert not [file for file in tmp_path.iterdir() if "safetensors" in file.name and file.suffix != ".json"]
    hub.corrupts = False
    fetch(tmp_path)


def test_an_index_and_headers_must_agree(hub: Hub, tmp_path: Path) -> None:
    hub.files["model-2.safetensors"] = weights("c", 64)
    assert refused(tmp_path / "other").problems[0].code == "bad_checkpoint"
    hub.files["model-2.safetensors"] = FILES["model-2.safetensors"][:-8]
    assert refused(tmp_path / "short").problems[0].code == "bad_checkpoint"


@pytest.mark.parametrize(
    ("change", "code", "kind"),
    [
        ({"status": 403, "error_code": "GatedRepo"}, "no_access", MachineError),
        ({"needs_token": True, "error_code": "GatedRepo"}, "no_access", MachineError),
        ({"needs_token": True}, "unknown_name", RecipeError),
        ({"status": 404, "error_code": "RepoNotFound"}, "unknown_name", RecipeError),
        ({"status": 503}, "no_network", MachineError),
        ({"files": {"config.json": b"{}", "pytorch_model.bin": b"x"}}, "unsupported", RecipeError),
    ],
)
def test_what_a_server_refuses_is_explained(
    hub: Hub, tmp_path: Path, change: dict[str, Any], code: str, kind: type[TrainspecError]
) -> None:
    vars(hub).update(change)
    error = refused(tmp_path / "tiny")
    assert isinstance(error, kind) and error.problems[0].code == code
    assert error.problems[0].hint
    if kind is MachineError:
        assert "hf download org/tiny" in error.problems[0].hint, "by hand, on a machine without a network"


def test_names_revisions_and_tokens(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(tmp_path / "a", "org/other").problems[0].code == "unknown_name"
    assert refused(tmp_path / "a", revision="v9").problems[0].path == "--revision"
    assert not (tmp_path / "a").exists()
    monkeypatch.setenv(download.TOKEN, TOKEN)
    hub.needs_token = True
    fetch(tmp_path / "a")
    assert f"Bearer {TOKEN}" in hub.tokens
    assert not any(TOKEN.encode() in file.read_bytes() for file in (tmp_path / "a").rglob("*") if file.is_file())


def test_no_network_and_a_full_disk(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = download.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: free._replace(free=1000))
    assert refused(tmp_path).problems[0].code == "disk_full"
    monkeypatch.undo()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    error = refused(tmp_path)
    assert isinstance(error, MachineError) and error.problems[0].code == "no_network"
    full = OSError(errno.ENOSPC, "No space left on device", "x")
    assert download._explain(full, HubName(NAME), tmp_path).problems[0].code == "disk_full"


@pytest.mark.slow
def test_ctrl_c_keeps_the_bytes_and_the_next_call_asks_for_the_rest(hub: Hub, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainspec_cli", "get", f"hf:{NAME}", "--json"]
    environment = os.environ | {"HF_ENDPOINT": hub.url, download.TOKEN: TOKEN}
    hub.pause_s = 0.3
    running = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    parts: list[Path] = []
    for _ in range(600):
        parts = [file for file in tmp_path.glob("tiny/.model-*.part") if file.stat().st_size > 2**16]
        if parts:
            break
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    output, errors = running.communicate(timeout=60)
    assert running.returncode == 130, output + errors
    held = parts[0].stat().st_size
    assert 2**16 < held < len(FILES["model-1.safetensors"])
    assert TOKEN not in output + errors
    hub.asked.clear()
    hub.pause_s = 0.0
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ("model-1.safetensors", f"bytes={held}-") in hub.asked
    told = json.loads(ended.stdout)
    assert told["commit"] == COMMIT and sorted(told["files"]) == sorted(WANTED)
    assert told["received_bytes"] == sum(len(FILES[name]) for name in WANTED[3:]) - held
    assert sorted(file.name for file in (tmp_path / "tiny").iterdir()) == sorted(WANTED)


@pytest.mark.parametrize("resized_by", [9, -9])
def test_answers_of_another_length_end_in_an_error(hub: Hub, tmp_path: Path, resized_by: int) -> None:
    hub.resized_by, hub.ignores_ranges = resized_by, True
    refused(tmp_path)
    assert len(hub.asked) <= 2 * download.TRIES + len(WANTED)


def test_a_server_without_ranges_that_always_breaks_off_ends_in_an_error(hub: Hub, tmp_path: Path) -> None:
    hub.ignores_ranges, hub.cuts = True, [300_000, *[200_000] * 50]
    refused(tmp_path)
    assert len(hub.asked) <= 2 * download.TRIES + len(WANTED)
