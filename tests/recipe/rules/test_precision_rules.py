"""What can be multiplied in fp8."""

from __future__ import annotations

import pytest

from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.rules.check import check_engine, check_machine

FP8 = {"precision.matmul": "fp8"}


def test_a_decoder_is(make_spec):
    assert check_engine(make_spec(FP8)) == []


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"layout.pp": 2, "layout.pipeline_schedule": "zbv", "model.num_layers": 4}, "layout.pipeline_schedule", "zbv"),
        ({"model.ffn_size": 168}, "model.ffn_size", "168"),
        ({"layout.tp": 2, "model.ffn_size": 176}, "model.ffn_size", "a side of 88"),
    ],
)
def test_what_is_not(make_spec, changes, path, message):
    (problem,) = check_engine(make_spec(FP8 | changes))
    assert (problem.code, problem.path) == ("unsupported", path)
    assert message in problem.message
    assert "precision.matmul=compute" in problem.hint


def test_a_gpu_without_fp8_is_told_and_a_cpu_emulates(make_spec):
    machine = Machine("node", cpu_cores=2, memory_bytes=2**34)
    assert check_machine(make_spec(FP8), machine) == []
    old = Machine("node", 2, 2**34, gpu_names=("NVIDIA A100-SXM4-80GB",) * 2, bf16=True)
    (problem,) = check_machine(make_spec(FP8), old)
    assert (problem.code, problem.environment) == ("no_fp8", True)
    assert check_machine(make_spec(FP8), Machine("node", 2, 2**34, gpu_names=("NVIDIA H100",) * 2, fp8=True)) == []


def test_torchao_may_lack(make_spec, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torchao" else object())
    (problem,) = check_machine(make_spec(FP8), Machine("node", 2, 2**34))
    assert problem.hint == "type pip install 'trainspec[float8]'"
