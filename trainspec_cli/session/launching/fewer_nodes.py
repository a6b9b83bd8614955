"""The plan of a run that goes on with fewer nodes than it was started on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainspec_cli.core.errors import TrainspecError
from trainspec_cli.plan.plan import plan
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.check import check
from trainspec_cli.recipe.rules.engine import check_engine
from trainspec_cli.recipe.rules.optim import describe_other_blocks
from trainspec_cli.session.console import RunConsole
from trainspec_cli.session.planning.predict import predict


def plan_on_fewer(before: Plan, nodes: int, *, machine: Machine) -> Plan | None:
    """Return the plan of the same run on so many nodes; None where its recipe allows none, or none fits.

    The layout is the recipe's. Where that does not divide the nodes it has other data parallelism, then fewer pipeline
    stages, and then whatever the search finds, if the prediction of memory says that it fits. Kernels stay as they were
    chosen; changes of layout that the recipe plans are of all nodes, and are not made.
    """
    quiet = RunConsole(quiet=True)  # nobody has asked for the prediction of what may never be
    for spec, must_be_predicted in _on_fewer(before, nodes):
        # The data was read when the run began; where it came from need not be there any more.
        if any(not problem.path.startswith("data.") for problem in [*check(spec), *check_engine(spec)]):
            continue
        try:
            found = predict(plan(spec, machine), machine, quiet, force=False)
        except TrainspecError:
            continue
        if describe_other_blocks(spec, before.layout.tp, found.layout.tp):
            continue
        if found.prediction is not None or not must_be_predicted:
            return replace(found, kernels=before.kernels)
    return None


def _on_fewer(before: Plan, nodes: int) -> Iterator[tuple[RunSpec, bool]]:
    """Yield the recipe with the layouts to try, and whether one that no prediction speaks of is passed over."""
    spec, wanted = before.spec, before.spec.layout
    fewer = replace(spec, cluster=replace(spec.cluster, num_nodes=nodes), scheduler=replace(spec.scheduler, changes=()))
    shards = before.layout.dp_shard > 1
    data = {"dp_replicate": 1, "dp_shard": AUTO} if shards else {"dp_replicate": AUTO, "dp_shard": 1}
    for pp in range(before.layout.pp, 0, -1):
        layout = wanted if pp == before.layout.pp else replace(wanted, pp=pp, stage_layers=None)
        yield replace(fewer, layout=layout), False
        yield replace(fewer, layout=replace(layout, **data)), False  # type: ignore[arg-type]
    axes = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), AUTO)
    yield replace(fewer, layout=replace(wanted, stage_layers=None, **axes)), True  # type: ignore[arg-type]
