"""A recipe with user-defined blocks and a user-defined loss: read, checked and planned without running them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from lab import own_model
from lab.problems import in_order

from trainspec_cli.__main__ import run
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.planner.capacity import plan_capacity
from trainspec_cli.planner.workload import count_params
from trainspec_cli.recipe.keys.model import OwnModel
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.user_code import describe_code
from trainspec_cli.session.recipe.load import load, load_for_planning, with_defaults

CODE = """
from pathlib import Path
Path("ran").write_text("this file was imported")

class Block:
    def __init__(self, hidden_size, layer, width=2): ...

def loss(logits, targets, smoothing=0.0): ...
"""
RECIPE = (
    *("recipe=tiny", "model=own", "model.block=mine.py:Block", "model.block_params=12000000"),
    *("model.options.width=3", "train.loss=mine.py:loss", "train.loss_options.smoothing=0.1"),
    *("model.hidden_size=1024", "cluster=h100", "batching.global_batch_size=64", "data.seq_len=2048", "layout.pp=2"),
)


def test_a_model_and_a_loss_of_ones_own_are_planned_as_the_recipe_says_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "mine.py"
    code.write_text(CODE)
    spec = load_for_planning(RECIPE).spec
    block, loss = describe_code(spec)
    assert in_order(block, "model.block", " Block ", str(code)) and in_order(loss, "train.loss", " loss ", str(code))
    usual = plan_capacity(spec)
    assert usual.params == 4 * 12_000_000 + 2 * 4096 * 1024 + 1024
    assert usual.best is not None and usual.best.fits
    layouts = [candidate.layout for candidate in usual.candidates]
    assert {(layout.tp, layout.cp, layout.pp) for layout in layouts} == {(1, 1, 2)}

    assert isinstance(spec.model, OwnModel)
    model = replace(spec.model, block_mixing_flops_per_token=5e7, block_saved_bytes_per_token=2e5)
    more = plan_capacity(replace(spec, model=model))
    assert more.flops_per_token - usual.flops_per_token == pytest.approx(3 * 4 * 5e7)
    assert more.best is not None
    assert more.best.peak_memory_bytes > usual.best.peak_memory_bytes
    assert more.best.step_time_s > usual.best.step_time_s
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_the_parameters_of_a_block_are_counted_where_the_recipe_leaves_them_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "mine.py"
    code.write_text(Path(own_model.__file__).read_text(encoding="utf-8") + 'print("imported")\n')
    recipe = ("recipe=tiny", "model=own", "model.block=mine.py:Averager", "model.hidden_size=64", "precision=fp32")
    assert run(["validate", *recipe]) == 0
    assert "imported" not in capsys.readouterr().out, "it runs nothing"
    assert run(["show", *recipe]) == 0
    assert "imported" not in capsys.readouterr().out, "nor does it"
    assert block_params(load_for_planning(recipe).spec) == own_model.BLOCK_PARAMS
    for asked in (load, load_for_planning):
        with pytest.raises(RecipeError) as refused:
            asked((*recipe, "optim.lrr=1"))
        assert [problem.path for problem in refused.value.problems] == ["optim.lrr"], "the rest is counted"


@pytest.mark.slow
def test_the_usual_length_of_a_run_follows_from_a_count_of_its_blocks() -> None:
    model = ("model=own", f"model.block={own_model.__file__}:Averager", "model.hidden_size=64", "cluster=h100")
    arguments, usual = with_defaults(model)
    spec = load_for_planning(arguments).spec
    assert block_params(spec) == own_model.BLOCK_PARAMS
    tokens = next(value for key, _, value in (one.partition("=") for one in usual) if key == "train.tokens")
    assert float(tokens) == pytest.approx(20 * count_params(spec.model), rel=0.01)


def block_params(spec: RunSpec) -> int | None:
    assert isinstance(spec.model, OwnModel)
    return spec.model.block_params
