"""Faults that a recipe asks for: which are this rank's, when they are due, and that each occurs once."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainspec_cli.core.environment_names import GROUP
from trainspec_cli.engine import accelerators
from trainspec_cli.engine.build import train_state
from trainspec_cli.engine.build.train_state import Throttle
from trainspec_cli.engine.run import faults
from trainspec_cli.engine.run.faults import Faults, InjectedFault
from trainspec_cli.engine.shares import Share
from trainspec_cli.run.folder.paths import RunDir


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """make("kill(step=4)", group=1, rank=2): -> the faults of that rank."""

    def make(text: str, group: int = 0, rank: int = 0) -> Faults:
        monkeypatch.setenv(GROUP, str(group))
        monkeypatch.setattr(faults, "dist", SimpleNamespace(get_rank=lambda: rank))
        return Faults(SimpleNamespace(spec=SimpleNamespace(fault=text)), RunDir(tmp_path))  # type: ignore[arg-type]

    (tmp_path / "faults").mkdir()
    return make


def bare(*shares: Share) -> Any:
    """Return the state of a rank that computes nothing."""
    stages = SimpleNamespace(throttle=Throttle({}))
    return SimpleNamespace(shares=list(shares), stages=stages, device=torch.device("cpu"))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """The signals that the process sends itself, and how long it sleeps."""
    sent: list[tuple[str, float]] = []
    monkeypatch.setattr(faults.os, "kill", lambda pid, number: sent.append(("signal", number)))
    monkeypatch.setattr(accelerators, "time", SimpleNamespace(sleep=lambda seconds: sent.append(("sleep", seconds))))
    return sent


@pytest.mark.parametrize(
    ("text", "group", "rank", "at"),
    [
        ("kill(step=4)", 0, 0, {4: [("signal", signal.SIGKILL)]}),
        ("stop(step=0)", 0, 0, {0: [("signal", signal.SIGSTOP)]}),
        ("kill(step=4,group=1,rank=2)", 1, 2, {4: [("signal", signal.SIGKILL)]}),
        ("kill(step=4,group=1,rank=2)", 1, 0, {}),
        ("kill(step=4,group=1,rank=2)", 2, 1, {}),
        ("kill(step=4); kill(step=5)", 0, 0, {4: [("signal", 9)], 5: [("signal", 9)]}),
        ("slow(step=2,seconds=0.2,steps=3)", 0, 0, {step: [("sleep", 0.2)] for step in (2, 3, 4)}),
        ("lighthouse(step=3)", 0, 0, {}),
    ],
)
def test_a_fault_occurs_on_its_rank_at_its_step(
    make: Any, sent: list[tuple[str, float]], text: str, group: int, rank: int, at: dict[int, Any]
) -> None:
    planted, found = make(text, group, rank), {}
    for step in range(8):
        planted.inject(step, bare())
        if sent:
            found[step] = list(sent)
        sent.clear()
    assert found == at


def test_a_fault_occurs_once_in_the_life_of_a_run_and_a_slow_step_each_time(
    make: Any, sent: list[tuple[str, float]], tmp_path: Path
) -> None:
    text = "kill(step=4); slow(step=4,seconds=0.5); kill(step=4)"
    make(text).inject(4, bare())
    assert sent == [("signal", 9), ("sleep", 0.5), ("signal", 9)]
    assert sorted(path.name for path in (tmp_path / "faults").iterdir()) == ["0_kill", "2_kill"]
    make(text).inject(4, bare())
    assert sent[3:] == [("sleep", 0.5)]


def test_a_throttle_lasts_for_its_steps_and_several_add_up(make: Any) -> None:
    throttle = Throttle({0: 1.0})
    state: Any = SimpleNamespace(stages=SimpleNamespace(throttle=throttle))
    planted = make("throttle(step=1,seconds=0.5,steps=3); throttle(step=2,seconds=0.25); throttle(step=1,rank=1)")
    found = []
    for step in range(6):
        planted.inject(step, state)
        found.append(throttle.sample_s)
    assert found == [0.0, 0.5, 0.75, 0.5, 0.0, 0.0]


def test_a_throttled_pass_waits_by_its_samples_and_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(train_state, "keep_busy", lambda device, seconds: waits.append(seconds))
    throttle = Throttle({0: 0.25, 2: 0.5}, sample_s=0.3)
    throttle.wait("forward", 0, 4)
    throttle.wait("backward", 0, 4)
    throttle.wait("backward_input", 2, 4)
    throttle.wait("backward_weight", 2, 0)
    assert waits == pytest.approx([0.1, 0.2, 0.2, 0.0])
    waits.clear()
    Throttle({0: 1.0}).wait("forward", 0, 4)
    assert waits == []


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("exception", InjectedFault, "fault injected"),
        ("oom", torch.OutOfMemoryError, "no memory"),
    ],
)
def test_an_error_is_raised(make: Any, kind: str, error: type[Exception], message: str) -> None:
    planted = make(f"{kind}(step=1)")
    planted.inject(0, bare())
    with pytest.raises(error, match=message):
        planted.inject(1, bare())


def test_a_flipped_bit_doubles_or_halves_one_value(make: Any) -> None:
    share = Share("w", torch.nn.Parameter(torch.full((3, 4), 1.5)))
    make("bitflip(step=1)").inject(1, bare(share))
    values = share.local.flatten().tolist()
    assert values.count(1.5) == 11
    assert (values[6], share.parameter.flatten()[6].item()) in ((0.75, 0.75), (3.0, 3.0))


def test_a_full_disk_lasts_for_its_steps(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, tuple[int, int]]] = []
    stand_in = SimpleNamespace(
        RLIMIT_FSIZE=resource.RLIMIT_FSIZE,
        RLIM_INFINITY=resource.RLIM_INFINITY,
        getpagesize=lambda: 4096,
        getrlimit=lambda _: (7, 10**9),
        setrlimit=lambda kind, limit: limits.append((kind, limit)),
    )
    monkeypatch.setattr(faults, "resource", stand_in)
    planted, after = make("disk_full(step=3,steps=2)"), []
    for step in range(7):
        planted.inject(step, bare())
        after.append(len(limits))
    assert after == [0, 0, 0, 1, 1, 2, 2]
    assert limits == [
        (resource.RLIMIT_FSIZE, (4096, 10**9)),
        (resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, 10**9)),
    ]


def test_a_fault_is_marked_before_it_occurs_in_a_folder_that_may_have_to_be_made(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process leaves no mark any more, and would be killed again after every restart."""
    (tmp_path / "faults").rmdir()
    marks: list[list[str]] = []
    monkeypatch.setattr(
        faults.os, "kill", lambda pid, number: marks.append([path.name for path in (tmp_path / "faults").iterdir()])
    )
    make("kill(step=1)").inject(1, bare())
    assert marks == [["0_kill"]]
