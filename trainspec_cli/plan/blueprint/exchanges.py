"""The exchanges of one training step of a rank: how many bytes each, and how often."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from trainspec_cli.plan.blueprint.algorithms import best_bucket_bytes, fastest, times_of
from trainspec_cli.plan.hardware.rates import Efficiency
from trainspec_cli.plan.hardware.topology import Fabric, Group
from trainspec_cli.plan.setup import Setup
from trainspec_cli.plan.time.step import MicroBatch, rank_parts
from trainspec_cli.plan.workload import layer_works
from trainspec_cli.recipe.results.blueprint import Exchange, Operation


@dataclass(frozen=True)
class Need:
    """An exchange that an axis has to make, whatever the fabric."""

    axis: str
    group: str
    """A group of `axis_groups`."""
    operation: Operation
    message_bytes: float
    per_step: float
    is_bucketed: bool = False
    """All of a rank's gradients or parameters: they go in buckets beside the computation."""


def exchanges_of(
    setup: Setup, once: MicroBatch, groups: Mapping[str, Group], fabric: Fabric, eff: Efficiency
) -> tuple[Exchange, ...]:
    """Return the exchanges of the rank that has most parameters, each by its fastest algorithm."""
    needs = [*_inside_layers(setup), *_sends(setup), *_of_parameters(setup, once)]
    return tuple(
        _exchange(need, groups[need.group], fabric, eff)
        for need in needs
        if groups[need.group].size > 1 and need.message_bytes > 0 and need.per_step > 0
    )


def _exchange(need: Need, group: Group, fabric: Fabric, eff: Efficiency) -> Exchange:
    bucket_bytes = None
    message_bytes, per_step = need.message_bytes, need.per_step
    if need.is_bucketed:
        bucket_bytes = best_bucket_bytes(group, need.operation, need.message_bytes, eff)
        message_bytes, per_step = bucket_bytes, per_step * need.message_bytes / bucket_bytes
    times = times_of(group, need.operation, message_bytes, eff)
    algorithm = fastest(times)
    return Exchange(
        axis=need.axis,
        operation=need.operation,
        ranks=group.size,
        tier=tier_of(group, fabric),
        message_bytes=message_bytes,
        per_step=per_step,
        algorithm=algorithm,
        time_s=times[algorithm],
        ring_s=times.get("ring", times.get("direct", times[algorithm])),
        bucket_bytes=bucket_bytes,
    )


def tier_of(group: Group, fabric: Fabric) -> str:
    """Name the outermost tier that a group crosses."""
    if not group.crosses:
        return "scale-up domain"
    return fabric.network[len(group.outer)].name


def _inside_layers(setup: Setup) -> Iterator[Need]:
    """Tensor, context and expert parallelism, of the layers of an average pipeline rank: forward and backward."""
    works = [work for parts in layer_works(setup.model, setup.tokens, setup.seq_len, setup.layout) for work in parts]
    times = setup.grad_accum / setup.layout.pp
    size, number = _mean((work.tp_bytes, work.tp_exchanges) for work in works)
    yield Need("tp", "tp", "all_reduce", size, 2 * times * number)
    size, number = _mean((work.cp_bytes, 1) for work in works)
    yield Need("cp", "cp", "all_gather", size, 3 * times * number)
    size, number = _mean((work.ep_bytes, 1) for work in works)
    yield Need("ep", "ep", "all_to_all", size, 4 * times * number)


def _mean(messages: Iterable[tuple[float, int]]) -> tuple[float, int]:
    """-> (bytes of the mean message, number of them) of (bytes, number); empty ones are none."""
    sent = [(size, number) for size, number in messages if size > 0]
    number = sum(number for _, number in sent)
    return (sum(size * times for size, times in sent) / number if number else 0.0), number


def _sends(setup: Setup) -> Iterator[Need]:
    """Activations and their gradients between the stages of a pipeline."""
    layout = setup.layout
    parts = layout.tp if layout.sequence_parallel or setup.software.split_sends else 1
    size = 2.0 * setup.tokens * setup.model.hidden_size / parts
    yield Need("pp", "pp", "send", size, 2.0 * layout.virtual_stages * setup.grad_accum)


def _of_parameters(setup: Setup, once: MicroBatch) -> Iterator[Need]:
    """Gradients and parameters of the pipeline rank that holds most of them."""
    part = max((rank.whole for rank in rank_parts(once, setup.layout)), key=lambda rank: rank.params)
    layout, trained = setup.layout, setup.trainable
    gradients, weights = trained * setup.software.reduce_bytes, 2.0
    for params, expert in ((part.params, False), (part.expert_params, True)):
        label = " (experts)" if expert else ""
        if layout.shards_parameters:
            shard = "expert_dp" if expert else "dp_shard"
            accum = setup.grad_accum
            yield Need(
                f"dp_shard{label}", shard, "all_gather", weights * setup.sharded * params, 2.0 * accum, is_bucketed=True
            )
            yield Need(f"dp_shard{label}", shard, "reduce_scatter", gradients * params, accum, is_bucketed=True)
            if not expert:
                own = gradients * params / (layout.dp_shard * layout.cp)
                yield Need("dp_replicate", "dp_replicate", "all_reduce", own, 1.0, is_bucketed=True)
        elif layout.dp_shard == 1:
            group = "expert_dp" if expert else "dp"
            yield Need(f"dp{label}", group, "all_reduce", gradients * params, 1.0, is_bucketed=True)
        else:
            group = "expert_dp" if expert else "dp"
            yield Need(f"dp{label}", group, "reduce_scatter", gradients * params, 1.0, is_bucketed=True)
            yield Need(f"dp{label}", group, "all_gather", trained * weights * params, 1.0, is_bucketed=True)
