"""A run's weights and model from Python, also of user-defined blocks, which no other project's format has."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import own_model

import trainspec_cli as trainspec
from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.initial import load_initial
from trainspec_cli.engine.checkpoint.files import Held
from trainspec_cli.engine.checkpoint.manifest import About
from trainspec_cli.engine.checkpoint.saver import Saver
from trainspec_cli.recipe.keys.run import InitSpec
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.own_code import keep_code
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import write_plan
from trainspec_cli.wings.certify.cases import Case, build_plan

CPU = torch.device("cpu")
TOKENS = torch.arange(12).reshape(2, 6)
Make = Callable[..., tuple[RunDir, torch.Tensor]]


@pytest.fixture
def make(tmp_path: Path, one_process: None) -> Make:
    """make(**changes of the spec): -> a run with checkpoints of steps 1 and 2, and the logits of the latter."""

    def made(**changes: Any) -> tuple[RunDir, torch.Tensor]:
        plan = build_plan(Case("dense"), "cpu")
        plan = replace(plan, spec=replace(plan.spec, **changes))
        run = RunDir(tmp_path / "run")
        run.root.mkdir()
        write_plan(run, plan)
        write_json(run.run_json, {"recipe": "tiny", "created_at": 1.0, "data_dir": None})
        keep_code(plan.spec, run)
        state = build_train_state(plan, CPU)
        saver = Saver(run, Held(state.shares, list(state.parts), state.optimizer), CPU, 2)
        for step in (1, 2):
            with torch.no_grad():
                for share in state.shares:
                    share.local.add_(0.01 * step)
            assert saver.save(About(step, step, 0, "")).error is None
        with torch.no_grad():
            return run, state.parts[0](TOKENS)

    return made


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, Any]:
    code = tmp_path / "blocks.py"
    code.write_bytes(Path(own_model.__file__).read_bytes())
    return code, replace(own_model.OWN, num_layers=2, block=f"{code}:Averager")


def test_a_model_of_user_defined_blocks_is_read_with_its_weights(make: Make, own: tuple[Path, Any]) -> None:
    code, model = own
    run, logits = make(model=model)
    weights = trainspec.read_weights(str(run.root))
    before = trainspec.read_weights(str(run.root), step=1)
    torch.testing.assert_close(weights["blocks.1.scale"], before["blocks.1.scale"] + 0.02)
    assert torch.equal(weights["blocks.0.decay"], torch.linspace(0.5, 1.0, own_model.HIDDEN))
    loaded = trainspec.load_model(str(run.root))
    assert set(loaded.state_dict()) == set(weights)
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS), logits)
    code.write_text(code.read_text() + "# changed\n")
    with pytest.raises(RecipeError) as refused:
        trainspec.load_model(str(run.root))
    assert [problem.code for problem in refused.value.problems] == ["changed_code"]
    assert set(trainspec.read_weights(str(run.root))) == set(weights), "it runs no code"


def test_a_decoder_is_read_too_and_adapters_are_not_taken_for_weights(make: Make) -> None:
    run, logits = make()
    with torch.no_grad():
        torch.testing.assert_close(trainspec.load_model(str(run.root))(TOKENS), logits)
    plan_json = run.plan_json.read_bytes()
    plan = build_plan(Case("dense"), "cpu")
    # A run that begins with the newest checkpoint of this one.
    plan = replace(plan, spec=replace(plan.spec, init=InitSpec(str(run.root)), train=replace(plan.spec.train, seed=9)))
    state = build_train_state(plan, CPU)
    load_initial(plan, state)
    with torch.no_grad():
        assert torch.equal(state.parts[0](TOKENS), logits)
    write_plan(run, replace(plan, spec=replace(plan.spec, lora=LoraSpec(rank=2))))
    with pytest.raises(RecipeError) as refused:
        trainspec.load_model(str(run.root))
    assert refused.value.problems[0].path == "lora.rank"
    run.plan_json.write_bytes(plan_json)
    (file,) = run.checkpoint(2).glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    os.utime(file)
    with pytest.raises(MachineError) as damaged:
        trainspec.read_weights(str(run.root))
    with pytest.raises(MachineError):
        load_initial(plan, state)
    assert damaged.value.problems[0].code == "bad_checkpoint"
