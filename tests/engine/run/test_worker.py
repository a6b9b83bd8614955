"""What a worker refuses before it begins."""

from dataclasses import replace

import pytest
import torch

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.engine.run.worker import refuse_buckets
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.wings.certify.cases import Case, build_plan


def test_a_bucket_size_is_refused_on_a_device_that_takes_the_cpus_place() -> None:
    plan = build_plan(Case("dense", Layout(dp_replicate=2)), "cpu")

    def with_buckets(size: int | None) -> Plan:
        return replace(plan, spec=replace(plan.spec, comm=replace(plan.spec.comm, bucket_bytes=size)))

    for size, device in ((1 << 20, "cpu"), (0, "cuda"), (None, "cuda")):
        refuse_buckets(with_buckets(size), torch.device(device))
    with pytest.raises(RecipeError) as refused:
        refuse_buckets(with_buckets(1 << 20), torch.device("cuda"))
    assert [problem.path for problem in refused.value.problems] == ["comm.bucket_bytes"]
