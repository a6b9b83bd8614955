"""Batches that are the same for every layout, and which steps are clipped, saved and made again."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from trainspec_cli.certify.cases import Case, build_plan
from trainspec_cli.engine.tools import __main__ as entry
from trainspec_cli.engine.tools import certify_worker
from trainspec_cli.engine.tools.certify_worker import drawn_batch, drawn_samples
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.spec.results.tools import CertifyRun, SpeedRequest, SpeedResult, TrainedSteps

CPU = torch.device("cpu")


def rank_of(data_rank: int, positions: torch.Tensor | None = None) -> Any:
    return SimpleNamespace(mesh=SimpleNamespace(data_rank=data_rank), device=CPU, positions_S=positions)


def seeded(plan: Plan, seed: int) -> Plan:
    return replace(plan, spec=replace(plan.spec, train=replace(plan.spec.train, seed=seed)))


def test_ranks_take_turns_in_a_batch_that_is_the_same_for_all_layouts() -> None:
    plan = seeded(build_plan(Case("dense", Layout(dp_replicate=2, dp_shard=2), micro_batch_size=1), "cpu"), 4)
    generator = torch.Generator().manual_seed(4 * 1_000_003 + 7)
    inputs, targets = drawn_samples(plan.spec, generator)
    assert inputs.shape == targets.shape == (8, 64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert 250 < int(inputs.max()) < plan.spec.model.vocab_size == 256
    for rank in range(4):
        first, second = drawn_batch(plan, rank_of(rank), step=7)
        for found, sample in ((first, rank), (second, 4 + rank)):
            assert torch.equal(found[0], inputs[sample : sample + 1])
            assert torch.equal(found[1], targets[sample : sample + 1])
    half = drawn_batch(plan, rank_of(1, torch.tensor([5, 3])), step=7)
    assert half[1][0].tolist() == [[inputs[5, 5].item(), inputs[5, 3].item()]]


@pytest.mark.parametrize(
    ("family", "shapes"), [("resnet", ((8, 1, 32, 32), (8,))), ("unet", ((8, 1, 16, 16, 16), (8, 16, 16, 16)))]
)
def test_images_have_a_label_each_or_one_for_every_voxel(family: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    images, labels = drawn_samples(build_plan(Case(family), "cpu").spec, torch.Generator().manual_seed(0))
    assert (tuple(images.shape), tuple(labels.shape)) == shapes
    assert (images.dtype, labels.dtype, int(labels.max())) == (torch.float32, torch.int64, 3)


class Steps:
    """Stand-ins of what training calls, which note what they are asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.drawn, self.clipped, self.tokens, self.saved = [], [], [], []
        self.restored: Any = None
        self.sources: list[Any] = []
        for name in ("drawn_batch", "train_step", "weights_sha256", "load_newest", "_save"):
            monkeypatch.setattr(certify_worker, name, getattr(self, name))

    def drawn_batch(self, plan: Any, state: Any, step: int) -> None:
        self.drawn.append(step)

    def train_step(self, state: Any, batch: Any, *, global_tokens: int, clip_norm: float | None) -> Any:
        self.clipped.append(clip_norm)
        self.tokens.append(global_tokens)
        number = len(self.drawn)
        return SimpleNamespace(loss=torch.tensor(10.0 - number), grad_norm=torch.tensor(3.0 - number / 4))

    def weights_sha256(self, shares: Any, group: Any) -> str:
        return f"{shares} {group}"

    def load_newest(self, run: Any, held: Any, device: Any) -> Any:
        self.sources.append(run.root)
        return self.restored

    def _save(self, plan: Any, state: Any, run: Any, step: int) -> None:
        self.saved.append((run.root, step))


STATE: Any = SimpleNamespace(shares="shares", held="held", device=CPU, mesh=SimpleNamespace(group=lambda axis: axis))


def wanted(**changes: Any) -> CertifyRun:
    plan = build_plan(Case("dense"), "cpu")
    plan = replace(plan, spec=replace(plan.spec, optim=replace(plan.spec.optim, grad_clip_norm=9.0)))
    run = CertifyRun(plan, 5, gradients=False, clip_from=3, clip_norm=0.1, save_at=2, resume=False, continues=None)
    return replace(run, **changes)


def test_steps_are_clipped_from_one_on_and_see_its_batch_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = Steps(monkeypatch)
    found = certify_worker.train(wanted(), STATE, tmp_path, source=None)
    assert steps.drawn == [0, 1, 2, 3, 3]
    assert steps.clipped == [9.0, 9.0, 9.0, 0.1, 0.1]
    assert set(steps.tokens) == {8 * 64}
    assert steps.saved == [(tmp_path, 2)]
    assert found == TrainedSteps((9.0, 8.0, 7.0, 6.0, 5.0), 3.0 - 5 / 4, "shares pp")
    assert not steps.sources


def test_without_clipping_every_step_has_its_own_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = Steps(monkeypatch)
    found = certify_worker.train(wanted(clip_from=None, save_at=None), STATE, tmp_path, source=None)
    assert (steps.drawn, steps.clipped, steps.saved) == ([0, 1, 2, 3, 4], [9.0] * 5, [])
    assert found.least_clipped_norm is None


def test_a_resumed_run_goes_on_after_the_checkpoints_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = Steps(monkeypatch)
    steps.restored = SimpleNamespace(manifest=SimpleNamespace(step=2))
    found = certify_worker.train(wanted(), STATE, tmp_path, source=tmp_path / "before")
    assert steps.sources == [tmp_path / "before"]
    assert steps.drawn == [2, 3, 3]
    assert len(found.losses) == 3
    assert steps.saved == []


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_is_made_once_or_again_from_its_own_checkpoint(
    resume: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []
    built = iter(["first", "second"])
    monkeypatch.setattr(certify_worker, "mesh_of", lambda layout, device_type: (layout, device_type))
    monkeypatch.setattr(certify_worker, "build_train_state", lambda plan, device, mesh: next(built))
    monkeypatch.setattr(certify_worker, "leave_first_gradients", lambda *given: asked.append(("gradients", *given[1:])))

    def train(run: CertifyRun, state: Any, folder: Path, source: Path | None) -> Any:
        asked.append((state, folder.name, source and source.name, run.save_at))
        return f"trained by {state}"

    monkeypatch.setattr(certify_worker, "train", train)
    run = wanted(resume=resume, gradients=True, continues="another")
    found = certify_worker.run_one(run, tmp_path, "this", CPU)
    assert asked[:2] == [("gradients", "first", tmp_path / "this"), ("first", "this", "another", 2)]
    assert asked[2:] == ([("second", "this", "this", None)] if resume else [])
    assert (found.trained, found.resumed) == ("trained by first", "trained by second" if resume else None)
    asked.clear()
    built = iter(["first"])
    certify_worker.run_one(wanted(), tmp_path, "this", CPU)
    assert asked == [("first", "this", None, 2)], "no gradients, no source"


# The entry of every tool


@pytest.mark.parametrize(("rank", "left"), [("0", True), ("1", False), (None, True)])
def test_the_first_process_leaves_the_result(
    rank: str | None, left: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(request: SpeedRequest) -> SpeedResult:
        assert request == SpeedRequest("cpu", "bf16")
        return SpeedResult("2.0", None, None, 1, 5.0, 6.0, 0)

    module: Any = ModuleType("trainspec_cli.engine.tools.standin")
    module.run = run
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "argv", ["tools", "standin", str(tmp_path)])
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    (tmp_path / "request.json").write_text(json.dumps({"device": "cpu", "compute": "bf16"}))
    entry.main()
    result = tmp_path / "tool_result.json"
    assert result.exists() == left
    if left:
        assert json.loads(result.read_text())["matmul_flops"] == 5.0


def test_processes_of_a_group_leave_it_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[str] = []
    module: Any = ModuleType("trainspec_cli.engine.tools.standin")
    module.run = lambda request: SpeedResult("2.0", None, None, 1, 5.0, 6.0, 0)
    module.run.__annotations__ = {"request": SpeedRequest}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "argv", ["tools", "standin", str(tmp_path)])
    monkeypatch.setattr(entry.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(entry.dist, "barrier", lambda: order.append("barrier"))
    monkeypatch.setattr(entry, "leave_processes", lambda: order.append("leave"))
    (tmp_path / "request.json").write_text(json.dumps({"device": "cpu", "compute": "bf16"}))
    entry.main()
    assert order == ["barrier", "leave"]
