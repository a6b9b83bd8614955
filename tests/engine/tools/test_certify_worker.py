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

from trainspec_cli.balance.batch.division import OwnSamples
from trainspec_cli.engine.checkpoint.manifest import About
from trainspec_cli.engine.tools import __main__ as entry
from trainspec_cli.engine.tools import certify_worker
from trainspec_cli.engine.tools.certify_worker import drawn_batch, drawn_samples, own_samples
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import CertifyRun, SpeedRequest, SpeedResult, TrainedSteps
from trainspec_cli.wings.certify.cases import Case, build_plan
from trainspec_cli.wings.certify.runs import Run

CPU = torch.device("cpu")


def rank_of(data_rank: int, positions: torch.Tensor | None = None) -> Any:
    return SimpleNamespace(mesh=SimpleNamespace(data_rank=data_rank), device=CPU, positions_S=positions)


def batch_of(case: Case, plan: Plan, state: Any, start: int, samples: int = 8) -> list[Any]:
    run = replace(Run(case).request("cpu"), plan=plan)
    return drawn_batch(plan.spec, state, own_samples(run, state, start, samples))


def seeded(plan: Plan, seed: int) -> Plan:
    return replace(plan, spec=replace(plan.spec, train=replace(plan.spec.train, seed=seed)))


def test_ranks_take_turns_in_a_batch_that_is_the_same_for_all_layouts() -> None:
    case = Case("dense", Layout(dp_replicate=2, dp_shard=2), micro_batch_size=1)
    plan = seeded(build_plan(case, "cpu"), 4)
    generator = torch.Generator().manual_seed(4 * 1_000_003 + 7)
    inputs, targets = drawn_samples(plan.spec, generator)
    assert inputs.shape == targets.shape == (8, 64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert 250 < int(inputs.max()) < plan.spec.model.vocab_size == 256
    for rank in range(4):
        first, second = batch_of(case, plan, rank_of(rank), 7 * 8)
        for found, sample in ((first, rank), (second, 4 + rank)):
            assert torch.equal(found[0], inputs[sample : sample + 1])
            assert torch.equal(found[1], targets[sample : sample + 1])
    half = batch_of(case, plan, rank_of(1, torch.tensor([5, 3])), 7 * 8)
    assert half[1][0].tolist() == [[inputs[5, 5].item(), inputs[5, 3].item()]]


def test_a_sample_is_the_same_in_whatever_step_and_share_it_is_taken() -> None:
    """The first rank takes 7 of 8 samples in two micro-batches, and the second has an empty one."""
    case = Case("dense", Layout(dp_shard=2), unequal_shares=True)
    plan = build_plan(case, "cpu")
    first, second = (batch_of(case, plan, rank_of(rank), 5) for rank in range(2))
    assert [len(tokens) for tokens, _ in first] == [4, 3]
    assert [len(tokens) for tokens, _ in second] == [1, 0], "ranks in step take their larger ones together"
    together = torch.cat([first[0][0], second[0][0], first[1][0], second[1][0]])
    whole = replace(plan, layout=Layout(), micro_batch_size=16)
    blocks = [batch_of(Case("dense"), whole, rank_of(0), start)[0][0] for start in (0, 8)]
    assert torch.equal(together, torch.cat(blocks)[5:13])


@pytest.mark.parametrize(
    ("family", "shapes"), [("resnet", ((8, 1, 32, 32), (8,))), ("unet", ((8, 1, 16, 16, 16), (8, 16, 16, 16)))]
)
def test_images_have_a_label_each_or_one_for_every_voxel(family: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    images, labels = drawn_samples(build_plan(Case(family), "cpu").spec, torch.Generator().manual_seed(0))
    assert (tuple(images.shape), tuple(labels.shape)) == shapes
    assert (images.dtype, labels.dtype, int(labels.max())) == (torch.float32, torch.int64, 3)


class Steps:
    """Stand-ins of the functions that training calls, which record the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.drawn, self.clipped, self.tokens, self.saved = [], [], [], []
        self.restored: Any = None
        self.sources: list[Any] = []
        self.rates: list[float] = []
        for name in ("drawn_batch", "train_step", "weights_sha256", "load_newest", "taken_by_all"):
            monkeypatch.setattr(certify_worker, name, getattr(self, name))
        monkeypatch.setattr(certify_worker, "Saver", self.saver)
        monkeypatch.setattr(certify_worker, "set_learning_rate", lambda _, rate: self.rates.append(rate))

    def drawn_batch(self, spec: Any, state: Any, own: OwnSamples) -> None:
        self.drawn.append(own.starts[0])

    def taken_by_all(self, taken: Any) -> Any:
        return tuple(positions for _, positions in taken)

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

    def saver(self, run: Any, *_: Any, keep_last: int) -> Any:
        def save(about: About) -> None:
            self.saved.append((run.root, about.step, about.samples))

        return SimpleNamespace(save=save, close=lambda: None)


MESH = SimpleNamespace(group=lambda axis: axis, data_rank=0)
STATE: Any = SimpleNamespace(shares="shares", held="held", device=CPU, mesh=MESH, optimizer="optimizer")


def wanted(**changes: Any) -> CertifyRun:
    plan = build_plan(Case("dense"), "cpu")
    plan = replace(plan, spec=replace(plan.spec, optim=replace(plan.spec.optim, grad_clip_norm=9.0)))
    run = CertifyRun(plan, 5, gradients=False, clip_from=3, clip_norm=0.1, save_at=2, resume=False, continues=None)
    return replace(run, **changes)


def test_steps_are_clipped_from_one_on_and_see_its_batch_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = Steps(monkeypatch)
    found = certify_worker.train(wanted(), STATE, tmp_path, source=None)
    assert steps.drawn == [0, 8, 16, 24, 24]
    assert steps.clipped == [9.0, 9.0, 9.0, 0.1, 0.1]
    assert set(steps.tokens) == {8 * 64}
    assert steps.saved == [(tmp_path, 2, 16)]
    assert set(steps.rates) == {0.1}
    assert found == TrainedSteps((9.0, 8.0, 7.0, 6.0, 5.0), 3.0 - 5 / 4, "shares pp", found.taken)
    assert [(*step,) for step in found.taken[2:4]] == [tuple(range(16, 24)), tuple(range(24, 32))]
    assert not steps.sources


def test_without_clipping_every_step_has_its_own_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = Steps(monkeypatch)
    found = certify_worker.train(wanted(clip_from=None, save_at=None), STATE, tmp_path, source=None)
    assert (steps.drawn, steps.clipped, steps.saved) == ([0, 8, 16, 24, 32], [9.0] * 5, [])
    assert found.least_clipped_norm is None


def test_a_resumed_run_goes_on_after_the_checkpoints_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = Steps(monkeypatch)
    steps.restored = SimpleNamespace(manifest=SimpleNamespace(step=2, about=SimpleNamespace(samples=16)))
    found = certify_worker.train(wanted(), STATE, tmp_path, source=tmp_path / "before")
    assert steps.sources == [tmp_path / "before"]
    assert steps.drawn == [16, 24, 24]
    assert len(found.losses) == 3
    assert steps.saved == []


def test_a_batch_that_grows_goes_on_where_the_step_before_it_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = Steps(monkeypatch)
    growing = Run(Case("dense", ramp=True), gradients=False).request("cpu")
    found = certify_worker.train(growing, STATE, tmp_path, source=None)
    assert steps.drawn == [0, 4, 8, 12, 20, 28, 40]
    assert [tokens // 64 for tokens in steps.tokens] == [4, 4, 4, 8, 8, 12, 12] == [len(step) for step in found.taken]
    assert steps.rates == pytest.approx([0.1] * 3 + [0.2] * 2 + [0.3] * 2), "plain descent: in proportion"


def test_what_the_ranks_took_is_told_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of tp took the same, and one of two others another sample than it should have."""
    first = [[0, [0, 1]], [0, [4]]]
    said = [first, first, [[1, [2, 3]], [1, [5, 6]]], [[1, [2, 3]], [1, [5, 5]]]]
    monkeypatch.setattr(certify_worker, "gather_json", lambda own, read: [read(one) for one in said])
    assert certify_worker.taken_by_all([(0, (0, 1)), (0, (4,))]) == ((0, 1, 2, 3), (4, 5, 5, 5, 6))


def test_ranks_may_be_of_another_data_rank_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks read their own samples, and then the same."""
    said = [[[0, [0, 1]], [0, [4, 5]]], [[1, [2, 3]], [0, [4, 5]]]]
    monkeypatch.setattr(certify_worker, "gather_json", lambda own, read: [read(one) for one in said])
    assert certify_worker.taken_by_all([]) == ((0, 1, 2, 3), (4, 5))


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_is_made_once_or_again_from_its_own_checkpoint(
    resume: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []
    built = iter(["first", "second"])
    monkeypatch.setattr(certify_worker.MESHES, "of", lambda layout, device_type: (layout, device_type))
    monkeypatch.setattr(certify_worker, "build_train_state", lambda plan, device, mesh: next(built))
    monkeypatch.setattr(certify_worker, "own_samples", lambda *given: given[2:])
    monkeypatch.setattr(certify_worker, "leave_gradients", lambda *given: asked.append(("gradients", *given[1:])))
    monkeypatch.setattr(certify_worker, "write_parameters", lambda *given: asked.append(("left", *given[:3])))

    def train(run: CertifyRun, state: Any, folder: Path, source: Path | None) -> Any:
        asked.append((state, folder.name, source and source.name, run.save_at))
        return f"trained by {state}"

    monkeypatch.setattr(certify_worker, "train", train)
    run = wanted(resume=resume, gradients=True, continues="another")
    found = certify_worker.run_one(run, tmp_path, "this", CPU)
    assert asked[:2] == [("gradients", "first", tmp_path / "this", (0, 8), 1), ("first", "this", "another", 2)]
    assert asked[2] == ("left", "first", tmp_path / "this", "weights"), "before the second run"
    assert asked[3:] == ([("second", "this", "this", None)] if resume else [])
    assert (found.trained, found.resumed) == ("trained by first", "trained by second" if resume else None)
    asked.clear()
    built = iter(["first"])
    certify_worker.run_one(wanted(), tmp_path, "this", CPU)
    assert asked[:-1] == [("first", "this", None, 2)], "no gradients, no source"
    asked.clear()
    built = iter(["first"])
    certify_worker.run_one(wanted(steps=0), tmp_path, "this", CPU)
    assert not [one for one in asked if one[0] == "left"], "untrained weights are not left"


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
