"""Checkpoints of a small model in this process; killed and resumed runs are in tests/integration."""

import pytest
import torch

from trainspec_cli.engine.checkpoint import store
from trainspec_cli.engine.checkpoint.manifest import MANIFEST, read_manifest
from trainspec_cli.engine.checkpoint.store import Held
from trainspec_cli.engine.optim.build import build_optimizer
from trainspec_cli.engine.optim.update import guarded_update
from trainspec_cli.engine.shares import Share
from trainspec_cli.errors import MachineError
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.optim import OptimSpec

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_process")


def trained(steps: int = 3, lr: float = 0.1) -> Held:
    torch.manual_seed(steps)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 2))
    shares = [Share(name, parameter) for name, parameter in model.named_parameters()]
    optimizer = build_optimizer(shares, OptimSpec(lr=lr))
    for _ in range(steps):
        model(torch.randn(4, 5)).square().sum().backward()
        guarded_update(optimizer, shares, torch.tensor(1.0), torch.tensor(1.0), None)
    return Held(shares, [model], optimizer)


def save(run_dir, held, step, keep_last=2):
    return store.save(
        run_dir,
        held,
        step=step,
        samples=step * 4,
        seed=1,
        recipe_digest="d",
        keep_last=keep_last,
        device=CPU,
    )


def everything(held):
    states = held.optimizer.state.values()
    return [*held.parts[0].state_dict().values(), *(t for s in states for t in s.values())]


def test_everything_comes_back_bit_for_bit(tmp_path):
    held = trained()
    written = save(RunDir(tmp_path), held, 3)
    expected_random = torch.randn(3)
    other = trained(1)
    manifest = store.load_newest(RunDir(tmp_path), other, CPU)
    assert manifest == written
    assert (manifest.step, manifest.samples, manifest.bytes) == (3, 12, sum(f.bytes for f in manifest.files))
    for ours, theirs in zip(everything(other), everything(held), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(torch.randn(3), expected_random), "the random generator goes on where it was"


def test_a_fresh_optimizer_without_state_takes_it(tmp_path):
    save(RunDir(tmp_path), trained(), 3)
    other = trained(0, lr=0.7)
    store.load_newest(RunDir(tmp_path), other, CPU)
    assert len(other.optimizer.state) == 6
    assert all(state["step"] == 3 for state in other.optimizer.state.values())
    assert {group["lr"] for group in other.optimizer.param_groups} == {0.7}, (
        "the rate is the recipe's, not the checkpoint's"
    )


def test_the_last_ones_are_kept_and_what_a_killed_save_left_is_cleared(tmp_path):
    run_dir = RunDir(tmp_path)
    held = trained()
    (run_dir.checkpoints / ".step_00000001.partial").mkdir(parents=True)
    for step in (1, 2, 3):
        save(run_dir, held, step)
    assert run_dir.checkpoint_steps() == [2, 3]
    assert sorted(path.name for path in run_dir.checkpoints.iterdir()) == ["step_00000002", "step_00000003"]


def test_no_checkpoint_is_no_error(tmp_path):
    assert store.load_newest(RunDir(tmp_path), trained(), CPU) is None


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip_a_bit, "was altered: its sha256 is not the manifest's"),
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), "bytes, the manifest says"),
        (lambda path: path.unlink(), "is missing"),
    ],
    ids=["altered", "truncated", "missing"],
)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_damaged_file_is_refused_by_name(tmp_path, name, damage, words):
    run_dir = RunDir(tmp_path)
    save(run_dir, trained(), step=3)
    damage(run_dir.checkpoint(3) / name)
    with pytest.raises(MachineError) as caught:
        store.load_newest(run_dir, trained(), CPU)
    message = str(caught.value)
    assert f"step_00000003/{name}" in message
    assert words in message
    assert "remove the folder" in caught.value.problems[0].hint


def test_a_manifest_that_cannot_be_read_is_refused_by_name(tmp_path):
    run_dir = RunDir(tmp_path)
    save(run_dir, trained(), step=3)
    manifest = run_dir.checkpoint(3) / MANIFEST
    manifest.write_text(manifest.read_text().replace("trainspec.checkpoint/1", "trainspec.checkpoint/9"))
    with pytest.raises(MachineError, match=r"manifest.json cannot be read: its schema is not trainspec.checkpoint/1"):
        read_manifest(run_dir.checkpoint(3))
