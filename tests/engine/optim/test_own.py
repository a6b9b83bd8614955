"""A user-defined optimizer: its updates, its state in checkpoints, and the errors before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lab.problems import raises

from trainspec_cli.core.errors import RecipeError, TrainspecError, WorkerError
from trainspec_cli.engine.checkpoint.files import Held
from trainspec_cli.engine.checkpoint.manifest import About
from trainspec_cli.engine.checkpoint.saver import Saver, load_newest
from trainspec_cli.engine.optim.optimizer import guarded_update, set_learning_rate
from trainspec_cli.engine.optim.own import OwnOptimizer, build_own_optimizer
from trainspec_cli.engine.shares import Share
from trainspec_cli.recipe.keys.training import OptimSpec
from trainspec_cli.run.folder.paths import RunDir

CPU = torch.device("cpu")
LION = """
import torch

class Lion(torch.optim.Optimizer):
    def __init__(self, groups, lr, beta=0.9):
        super().__init__(groups, {"lr": lr, "beta": beta})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["updates"], state["average"] = 0, torch.zeros_like(p)
                state["updates"] += 1
                average = state["average"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(average.lerp(p.grad, 0.1).sign_(), alpha=group["lr"] / state["updates"])
                average.lerp_(p.grad, 1 - group["beta"])
BODY
"""


class Recipe:
    """The part of a RunSpec that the optimizer is made from."""

    def __init__(self, **optim: Any):
        self.optim = OptimSpec(**{"lr": 0.1, **optim})


@pytest.fixture
def lion(tmp_path: Path) -> Any:
    """lion(body): the file of an optimizer, with a further line at the end of its update."""

    def write(body: str = "") -> str:
        file = tmp_path / f"lion{len(list(tmp_path.glob('lion*')))}.py"
        file.write_text(LION.replace("BODY", body and f"                {body}"))
        return f"{file}:Lion"

    return write


def shares_of(seed: int = 0) -> list[Share]:
    drawn = torch.Generator().manual_seed(seed)
    shapes: tuple[tuple[int, ...], ...] = ((4, 3), (5,), (2, 2, 2), (), (0, 3))
    return [Share(str(n), torch.nn.Parameter(torch.randn(shape, generator=drawn))) for n, shape in enumerate(shapes)]


def build(shares: list[Share], name: str, **optim: Any) -> OwnOptimizer:
    return build_own_optimizer(shares, Recipe(name=name, **optim))  # type: ignore[arg-type]


def train(optimizer: OwnOptimizer, shares: list[Share], steps: range, skip: int | None = None) -> None:
    for step in steps:
        drawn = torch.Generator().manual_seed(100 + step)
        for share in shares:
            share.parameter.grad = torch.randn(share.parameter.shape, generator=drawn)
        set_learning_rate(optimizer, 0.1 / (1 + step))
        loss = torch.tensor(float("nan") if step == skip else 1.0)
        skipped = guarded_update(optimizer, shares, torch.tensor(3.0), loss, 1.5)
        assert bool(skipped) == (step == skip)


def values(shares: list[Share]) -> list[torch.Tensor]:
    return [share.parameter.detach() for share in shares]


def test_a_class_of_torch_trains_as_it_does_alone() -> None:
    """With clipping by half, decay of matrices alone, a rate that changes, and a step that is skipped."""
    ours, theirs = shares_of(), shares_of()
    optimizer = build(ours, "torch.optim:RMSprop", options={"alpha": 0.8}, state_bytes=4.0, weight_decay=0.2)
    groups = [
        {"params": [s.parameter for s in theirs if s.parameter.dim() > 1], "weight_decay": 0.2},
        {"params": [s.parameter for s in theirs if s.parameter.dim() <= 1]},
    ]
    reference = torch.optim.RMSprop(groups, lr=0.1, alpha=0.8)
    train(optimizer, ours, range(4), skip=1)
    for step in (0, 2, 3):
        drawn = torch.Generator().manual_seed(100 + step)
        for share in theirs:
            share.parameter.grad = torch.randn(share.parameter.shape, generator=drawn) / 2
        for group in reference.param_groups:
            group["lr"] = 0.1 / (1 + step)
        reference.step()
    assert all(torch.equal(one, other) for one, other in zip(values(ours), values(theirs), strict=True))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("saved_at", [1, 3])
@pytest.mark.parametrize("name", ["lion", "torch.optim:NAdam", "torch.optim:Adagrad"])
def test_a_run_goes_on_from_its_checkpoint_to_the_bit(tmp_path: Path, lion: Any, name: str, saved_at: int) -> None:
    """Also of an optimizer that counts in Python's numbers, of one that creates its state immediately, and from a
    checkpoint before the first update, which was skipped."""
    wanted = {"lion": 4.0, "torch.optim:NAdam": 8.0, "torch.optim:Adagrad": 4.0}[name]
    name = lion() if name == "lion" else name
    whole, before, after = (shares_of() for _ in range(3))
    train(build(whole, name, state_bytes=wanted), whole, range(6), skip=0)
    optimizer = build(before, name, state_bytes=wanted)
    train(optimizer, before, range(saved_at), skip=0)
    run = RunDir(tmp_path / "run")
    Saver(run, Held(before, [], optimizer), CPU, 2).save(About(1, samples=1, seed=1, recipe_digest="d"))
    resumed = build(after, name, state_bytes=wanted)
    load_newest(run, Held(after, [], resumed), CPU)
    train(resumed, after, range(saved_at, 6), skip=0)
    assert all(torch.equal(one, other) for one, other in zip(values(after), values(whole), strict=True))


def test_a_state_that_is_loaded_over_that_of_later_updates_is_taken(lion: Any) -> None:
    """This happens if a replica group heals, even with a state from before the first update."""
    name, shares, fresh = lion(), shares_of(), shares_of()
    optimizer = build(shares, name, state_bytes=4.0)
    start = Held(shares, [], optimizer).tensors()
    kept = [tensor.clone() for tensor in start]
    train(optimizer, shares, range(3))
    assert [optimizer.state[share.local]["updates"].item() for share in shares] == [3] * len(shares)
    for tensor, old in zip(Held(shares, [], optimizer).tensors(), kept, strict=True):
        tensor.copy_(old)
    train(optimizer, shares, range(2))
    train(build(fresh, name, state_bytes=4.0), fresh, range(2))
    assert all(torch.equal(one, other) for one, other in zip(values(shares), values(fresh), strict=True))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("p.mul_(1 / (1 + p.norm()))", "elementwise"),
        ("state['row'] = torch.zeros(2)", "keeps `row`, a tensor of (2,)"),
        ("state['more'] = [1]", "keeps `more`, list"),
        ("state[str(state['updates'])] = 1", "state entries"),
        ("raise ValueError('boo')", "raised ValueError: boo "),
    ],
)
def test_what_cannot_be_trained_with_is_refused_before_the_run(lion: Any, body: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build(shares_of(), lion(body), state_bytes=4.0)
    assert words in str(caught.value)


def test_the_bytes_of_state_are_measured(lion: Any) -> None:
    with raises(RecipeError, "contradiction", " 8, ", " 4 bytes", path="optim.state_bytes") as caught:
        build(shares_of(), lion(), state_bytes=8.0)
    assert "optim.state_bytes=4" in caught.value.problems[0].hint


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("if p.shape == (4, 3): raise ValueError('boo')", "raised ValueError: boo "),
        ("if p.shape == (4, 3): state['average'] = p.sum()", "stores `average`"),
        ("group['d'] = p.numel()", "changed `d`"),
    ],
)
def test_what_goes_wrong_in_a_step_is_said_in_its_own_words(lion: Any, body: str, words: str) -> None:
    shares = shares_of()
    optimizer = build(shares, name := lion(body), state_bytes=4.0)
    with pytest.raises(WorkerError) as caught:
        train(optimizer, shares, range(1))
    assert words in str(caught.value)
    if "raised" in words:
        file, line = name.rpartition(":")[0], 1 + LION.splitlines().index("BODY")
        assert f"({file}:{line}, in step: {body}" in str(caught.value)


def test_memory_that_runs_out_is_no_fault_of_the_code(lion: Any) -> None:
    shares = shares_of()
    optimizer = build(shares, lion("if p.shape == (4, 3): raise torch.OutOfMemoryError('x')"), state_bytes=4.0)
    with pytest.raises(torch.OutOfMemoryError):
        train(optimizer, shares, range(1))


def test_what_is_no_optimizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def make(groups, lr): return 3\n")
    with pytest.raises(TrainspecError, match=r" int; .*Optimizer"):
        build(shares_of(), f"{tmp_path}/own.py:make", state_bytes=0.0)
