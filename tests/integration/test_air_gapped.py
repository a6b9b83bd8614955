"""Where there is no way out: a bundle installs and trains, and nothing that trainspec does asks for one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import no_route
from lab.no_route import Listening

CHECKOUT = Path(__file__).parents[2]
PYTHON = Path(sys.base_prefix) / "bin" / "python{}.{}".format(*sys.version_info[:2])
SHORT = (
    "recipe=quickstart",
    "train.max_steps=4",
    "optim.schedule.warmup_steps=1",
    "run.dir=run",
    "sample.max_new_tokens=4",
)
CONVERSATIONS = CHECKOUT / "recipes" / "tiny_chat.jsonl"


def done(command: list[str], folder: Path, **environment: str) -> str:
    """Run a command and return its output. Fails if the exit code is not 0."""
    given = {"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder), **environment}
    ended = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, f"{command}: {ended.stdout}\n{ended.stderr}"
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle for this machine with a recipe's data, made as a user makes it: by pip's settings."""
    no_route.require()
    folder = tmp_path_factory.mktemp("made")
    (folder / "texts").mkdir()
    (folder / "texts" / "replies.jsonl").write_bytes(CONVERSATIONS.read_bytes())
    (folder / "recipes").mkdir()
    (folder / "recipes" / "own.yaml").write_text(
        "defaults:\n  - override /model: llama_tiny\n  - override /data: chat\n  - override /cluster: cpu\n"
        "data:\n  path: texts/replies.jsonl\n  chat_template: chatml\n  seq_len: 128\n"
        "batching:\n  global_batch_size: 16\ntrain:\n  max_steps: 3\noptim:\n  lr: 1.0e-3\n"
    )
    command = [sys.executable, "-m", "trainspec_cli", "bundle", "out", "recipe=own"]
    done(command, folder, **pip_settings(), PYTHONPATH=str(CHECKOUT))
    return folder / "out"


def pip_settings() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name.startswith(("PIP_", "XDG_", "SSL_", "HTTP", "http"))
    }


@pytest.fixture(scope="module")
def installed(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """trainspec, installed where there is no route, and the bundle; the folder that it was made in is gone."""
    elsewhere = tmp_path_factory.mktemp("else where")
    bundle = bundle.rename(elsewhere / "bundle")
    said = done(no_route.without_route([str(PYTHON), str(bundle / "install.py"), "venv"]), elsewhere)
    assert "launch recipe=own data.source=tokens" in said
    return elsewhere


def trainspec(installed: Path, *arguments: str) -> list[str]:
    return [str(installed / "venv" / "bin" / "trainspec"), *arguments]


@pytest.mark.slow
def test_a_bundle_installs_and_trains_where_there_is_no_route(installed: Path) -> None:
    launched = no_route.without_route(trainspec(installed, "launch", *SHORT))
    assert "done after 4 steps" in done(launched, installed)
    reported = done(no_route.without_route(trainspec(installed, "report", "run")), installed)
    assert "quickstart" in reported
    planned = no_route.without_route(trainspec(installed, "plan", "recipe=llama3_8b", "cluster=h100"))
    assert "Layouts" in done(planned, installed)


@pytest.mark.slow
def test_a_recipe_of_ones_own_finds_its_data_in_the_bundle(installed: Path) -> None:
    words = ["recipe=own", "data.source=tokens", "data.path=data/own", "data.document_masks=true", "run.dir=run"]
    said = done(no_route.without_route(trainspec(installed, "launch", *words)), installed / "bundle")
    assert "done after 3 steps" in said
    checked = trainspec(installed, "bundle", "bundle", "--check")
    assert "bundle is complete" in done(checked, installed), "a run next to the bundle's folders is allowed"


@pytest.mark.slow
def test_there_is_no_route_and_no_name_where_these_tests_run() -> None:
    no_route.require()
    script = "import socket\ntry: socket.create_connection(('192.0.2.7', 80), 5)\nexcept OSError as error: print(error)"
    assert "Network is unreachable" in done(no_route.without_route([sys.executable, "-c", script]), Path("/tmp"))
    script = "import socket\ntry: socket.getaddrinfo('trainspec.example', 80)\nexcept OSError as error: print(error)"
    assert "Errno -" in done(no_route.without_route([sys.executable, "-c", script]), Path("/tmp"))


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listening]:
    no_route.require()
    with Listening(tmp_path).open() as place:
        yield place


CALLS = """
import socket
for family, kind, address in (
    (socket.AF_INET, socket.SOCK_STREAM, ("198.51.100.7", 80)),
    (socket.AF_INET6, socket.SOCK_STREAM, ("2001:db8:1::7", 443)),
    (socket.AF_INET, socket.SOCK_DGRAM, ("198.51.100.8", 53)),
):
    with socket.socket(family, kind) as out:
        try:
            out.connect(address)
            out.send(b"x")
        except OSError as error:
            print(error.strerror)
try:
    socket.getaddrinfo("telemetry.example", 80)
except OSError:
    pass
"""


@pytest.mark.slow
def test_whatever_calls_out_is_refused_and_recorded(listening: Listening) -> None:
    refused = done(listening.inside([sys.executable, "-c", CALLS]), Path("/tmp"))
    assert refused.count("refused") >= 2
    called = set(listening.calls())
    assert {"198.51.100.7:80", "2001:db8:1::7:443", "198.51.100.8:53", "telemetry.example"} <= called


COMMANDS = (
    ("validate", "recipe=quickstart"),
    ("plan", "recipe=llama3_8b", "cluster=h100"),
    ("data", "prepare", "recipe=tiny"),
    (
        "launch",
        "recipe=tiny",
        "run.dir=run",
        "train.max_steps=8",
        "checkpoint.interval_steps=4",
        "tracking.tensorboard=false",
    ),
    ("resume", "run", "train.max_steps=10"),
    ("report", "run", "--html", "run.html"),
    ("diagnose", "run"),
    ("runs",),
    ("export", "run", "--output", "weights"),
    ("list", "recipe"),
    ("explain", "optim.lr"),
)


@pytest.mark.slow
def test_no_command_calls_out(listening: Listening, tmp_path: Path) -> None:
    """This node's own name is looked up in /etc/hosts only, so a lookup of it does not count as a call."""
    for words in COMMANDS:
        done(listening.inside([sys.executable, "-m", "trainspec_cli", *words]), tmp_path, PYTHONPATH=str(CHECKOUT))
    doctor = [sys.executable, "-m", "trainspec_cli", "doctor"]
    ended = subprocess.run(
        listening.inside(doctor), cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(CHECKOUT)}, capture_output=True
    )
    assert ended.returncode in (0, 4), ended.stderr.decode()
    assert [call for call in listening.calls() if call.partition(".")[0] != socket.gethostname()] == []


@pytest.mark.slow
@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_trackers_keep_to_the_run_folder_and_report_to_nobody(
    tracker: str, listening: Listening, tmp_path: Path
) -> None:
    pytest.importorskip(tracker)
    words = ["launch", "recipe=tiny", "run.dir=run", "train.max_steps=2", f"tracking.{tracker}=true"]
    done(listening.inside([sys.executable, "-m", "trainspec_cli", *words]), tmp_path, PYTHONPATH=str(CHECKOUT))
    assert list((tmp_path / "run").glob(f"{tracker}*"))
    assert [call for call in listening.calls() if call.partition(".")[0] != socket.gethostname()] == []
