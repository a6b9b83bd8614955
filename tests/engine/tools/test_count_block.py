"""The parameters of a user-defined block, counted for a recipe that leaves them out."""

from __future__ import annotations

from dataclasses import replace

from lab.own_model import BLOCK_PARAMS, OWN

from trainspec_cli.engine.tools.count_block import run
from trainspec_cli.recipe.results.tools import BlockCount, BlockRequest


def test_a_block_is_counted_and_a_wrong_one_is_a_problem_and_no_failure() -> None:
    assert run(BlockRequest(replace(OWN, block_params=None))) == BlockCount(BLOCK_PARAMS)
    problem = run(BlockRequest(replace(OWN, block_params=None, options={"width": "two"}))).problem
    assert problem is not None
    assert (problem.code, problem.path) == ("own_code", "model.block")
