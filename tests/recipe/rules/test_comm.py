"""Formats on the wire that do not go with the rest of a recipe are refused, with what to type instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.keys.training import CommSpec
from trainspec_cli.recipe.rules.check import apply
from trainspec_cli.recipe.rules.layout import COMM_RULES, exchanged, joined
from trainspec_cli.wings.certify.cases import Case, build_plan

SPEC = build_plan(Case("dense"), "cpu").spec


def with_comm(**comm: Any) -> RunSpec:
    return replace(SPEC, comm=CommSpec(**comm))


def on_nodes(spec: RunSpec, nodes: int, reduce: Any = "fp32") -> RunSpec:
    precision = replace(spec.precision, reduce=reduce)
    return replace(spec, cluster=replace(spec.cluster, num_nodes=nodes), precision=precision)


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        *(on_nodes(with_comm(gradients=name), 1) for name in ("bf16", "int8", "int4", "auto")),
        on_nodes(with_comm(parameters="int8"), 1, "bf16"),
        on_nodes(with_comm(across_nodes="int4"), 2),
    ],
)
def test_these_go_together(spec: RunSpec) -> None:
    assert apply(COMM_RULES, spec) == []


@pytest.mark.parametrize(
    ("spec", "path", "words"),
    [
        (on_nodes(with_comm(gradients="int8"), 1, "bf16"), "precision.reduce", "set precision.reduce=fp32"),
        (on_nodes(with_comm(across_nodes="int4"), 2, "bf16"), "precision.reduce", "comm.across_nodes=full"),
        (with_comm(parameters="int4"), "comm.parameters", "set comm.parameters=int8"),
        (on_nodes(with_comm(across_nodes="int8"), 1), "comm.across_nodes", "comm.gradients=int8"),
    ],
)
def test_these_are_refused(spec: RunSpec, path: str, words: str) -> None:
    (problem,) = apply(COMM_RULES, spec)
    assert problem.path == path and words in problem.hint


@pytest.mark.parametrize(
    ("comm", "layout", "groups", "path"),
    [
        ({"gradients": "int8"}, Layout(tp=2), 1, "comm.gradients"),
        ({"across_nodes": "bf16"}, Layout(), 1, "comm.across_nodes"),
        ({"parameters": "int8"}, Layout(dp_replicate=2), 1, "comm.parameters"),
        ({"gradients": "auto"}, Layout(), 1, ""),
        ({"gradients": "int8"}, Layout(), 2, ""),
        ({"gradients": "int8", "parameters": "int8"}, Layout(cp=2), 1, ""),
        ({"gradients": "int4"}, Layout(dp_replicate=2), 1, ""),
    ],
)
def test_formats_need_an_exchange_that_they_are_for(
    comm: dict[str, Any], layout: Layout, groups: int, path: str
) -> None:
    found = list(exchanged(with_comm(**comm), layout, groups))
    assert [problem.path for problem in found] == ([path] if path else [])
    assert all(layout.describe() in problem.message and problem.hint.startswith("set ") for problem in found)


@pytest.mark.parametrize(
    ("comm", "layout", "device", "why"),
    [
        ({"bucket_bytes": 8}, Layout(dp_shard=2), "cpu", ""),
        ({"bucket_bytes": 8}, Layout(dp_replicate=2), "cpu", ""),
        ({"bucket_bytes": 8, "parameters": "int8"}, Layout(dp_shard=2), "cpu", ""),
        ({"bucket_bytes": 8}, Layout(dp_shard=2), "cuda", "on GPUs, FSDP2 sums the gradients of each block"),
        ({"bucket_bytes": 8}, Layout(tp=2), "cpu", "in this layout (tp=2) no ranks sum gradients"),
        ({"bucket_bytes": 8, "gradients": "int8"}, Layout(dp_shard=2), "cpu", "block by block"),
        ({"bucket_bytes": 8, "across_nodes": "int4"}, Layout(dp_shard=2), "cpu", "block by block"),
        ({"bucket_bytes": 0}, Layout(tp=2), "cuda", ""),
        ({}, Layout(), "cuda", ""),
    ],
)
def test_buckets_are_of_gradients_that_go_together(comm: dict[str, Any], layout: Layout, device: str, why: str) -> None:
    found = list(joined(with_comm(**comm), layout, device))
    assert len(found) == bool(why)
    assert all(why in problem.message and "comm.bucket_bytes=null" in problem.hint for problem in found)
