"""The plan of a run on a cluster of several pools, and beside it the plans on fewer of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainspec_cli.core.printable import format_duration
from trainspec_cli.planner import workload
from trainspec_cli.planner.capacity import SHOWN, choose_safest
from trainspec_cli.planner.capacity import assumptions as assumptions_of
from trainspec_cli.planner.hardware.cluster import efficiency_of
from trainspec_cli.planner.hardware.rates import peak_flops_per_s
from trainspec_cli.planner.pipeline import layers_per_rank
from trainspec_cli.planner.pools.describe import Pool, describe_pools, on_pools, pool_names
from trainspec_cli.planner.pools.search import Placed, PoolSearch, stages_on
from trainspec_cli.planner.run.batches import sizes_to_predict
from trainspec_cli.planner.run.forecast import forecast_run
from trainspec_cli.planner.search.advice import OFFLOADED, OPEN
from trainspec_cli.planner.search.search import share_recomputed
from trainspec_cli.planner.search.variants import plan_on_what_divides
from trainspec_cli.recipe.keys.cluster import PoolSpec
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.blueprint import PoolChoice, PoolsPlan
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan, MemoryBreakdown, PoolPart, SizedStep

SAME = 5e-3
"""Choices that differ by less than this part are as fast, or as cheap."""


def plan_pools(spec: RunSpec, shown: int = SHOWN) -> CapacityPlan:
    """Search the layouts over all pools of `spec`'s cluster. Raises RecipeError as `plan_capacity` does."""
    pools = describe_pools(spec.cluster)
    eff = efficiency_of(spec.cluster)
    search = PoolSearch(spec, pools, eff)
    candidates = [_candidate(placed, search) for placed in search.run(shown)]
    length = 1 if spec.model.unit == "samples" else spec.data.seq_len
    return CapacityPlan(
        params=workload.count_params(spec.model),
        adapter_params=workload.adapter_params(spec.model, spec.lora),
        active_params=workload.count_active_params(spec.model),
        flops_per_token=workload.flops_per_token(spec.model, spec.data.seq_len, spec.lora),
        world_size=sum(pool.devices for pool in pools),
        tokens_per_step=spec.batching.global_batch_size * length,
        candidates=tuple(candidates),
        rejected=dict(+search.refused),
        safest=choose_safest(candidates, ()),
        assumptions=tuple(_assumptions(spec, pools)),
        considered=search.considered,
    )


def _candidate(placed: Placed, search: PoolSearch) -> Candidate:
    spec = search.spec
    pools = search.pools
    step = placed.step
    length = 1 if spec.model.unit == "samples" else spec.data.seq_len
    setup = placed.setups[0]
    fullest = placed.fullest_pool(pools)
    devices = setup.fabric.num_devices
    tokens_per_s = search.samples * length / step.time.total_s
    model_flops = workload.flops_per_token(spec.model, spec.data.seq_len, spec.lora)
    peak_flops = sum(pool.devices * peak_flops_per_s(pool.fabric.chip, setup.matmul) for pool in pools)
    mfu = tokens_per_s * model_flops / peak_flops
    attention = workload.mixing_flops_per_token(spec.model, spec.data.seq_len)
    again = share_recomputed(setup, model_flops - attention, attention)
    return Candidate(
        layout=step.layout,
        micro_batch_size=int(setup.micro_batch_size),
        grad_accum_steps=step.micro_batches,
        recompute=placed.recompute,
        offload="optimizer" if setup.offload_optimizer else "none",
        step_time_s=step.time.total_s,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=tokens_per_s / devices,
        mfu=mfu,
        hfu=mfu * (1 + again),
        peak_memory_bytes=placed.peak_bytes(fullest),
        memory_limit_bytes=pools[fullest].limit_bytes,
        fit_probability=search.fit_probability(placed),
        expected_step_s=search.expected_s(placed),
        memory=_memory(placed, fullest),
        time=step.time,
        sized_steps=tuple(
            SizedStep(size, search.watch.step_as_cut(placed.setups, placed.placement, size).time)
            for size in sizes_to_predict(spec)
        ),
        pools=tuple(_part(placed, pools, pool) for pool in range(len(pools))),
    )


def _memory(placed: Placed, fullest: int) -> tuple[MemoryBreakdown, ...]:
    """Return the memory of each pipeline stage, which is that of the fullest pool where all have every stage."""
    if not placed.placement.order:
        return placed.memory[fullest]
    of_pool = [iter(stages) for stages in placed.memory]
    return tuple(next(of_pool[pool]) for pool in placed.placement.pool_of_stage_rank)


def _part(placed: Placed, pools: Sequence[Pool], pool: int) -> PoolPart:
    step = placed.step
    ranks = stages_on(pool, placed.placement, placed.step.layout)
    layers = layers_per_rank(placed.setups[0].model.num_layers, step.layout)
    return PoolPart(
        pool=pools[pool].name,
        accelerator=pools[pool].fabric.chip.name,
        devices=pools[pool].devices,
        stages=len(ranks),
        layers=sum(layers[rank] for rank in ranks),
        samples=step.samples[pool],
        micro_batch_size=step.largest[pool],
        time=step.of_pools[pool],
        waiting_s=step.waiting_s[pool],
        peak_memory_bytes=placed.peak_bytes(pool),
        memory_limit_bytes=pools[pool].limit_bytes,
    )


def _assumptions(spec: RunSpec, pools: Sequence[Pool]) -> Iterator[str]:
    """Yield what the layouts rest on, that of each pool once."""
    names = pool_names(spec.cluster.pools)
    alone = ((on_pools(spec, [spec.cluster.pools[names.index(pool.name)]]), pool.fabric) for pool in pools)
    yield from dict.fromkeys(line for on_one, fabric in alone for line in assumptions_of(on_one, fabric))
    if pools[0].link_gbit_per_s is None:
        yield "pools are joined by the NICs of the slower one (cluster.pool_link_gbit_per_s)"
    yield "tensor-, context- and expert-parallel groups stay in one pool; no blueprint is drawn over several"
    yield "a cluster of several pools is planned, not launched: the engine places no layout by kind of node"


# Beside the plans on fewer pools


def compare_pools(spec: RunSpec, capacity: CapacityPlan) -> PoolsPlan:
    """Set the plan on all pools beside the best ones on each alone, and of three or more on all but one."""
    pools = spec.cluster.pools
    names = pool_names(pools)
    every = range(len(pools))
    fewer = [[place] for place in every]
    if len(pools) > 2:
        fewer = [*([place for place in every if place != left] for left in every), *fewer]
    choices = [*_on_all(spec, names, capacity)]
    choices += [_on_some(spec, [pools[place] for place in some], [names[place] for place in some]) for some in fewer]
    return PoolsPlan(tuple(choices), _verdict(choices, len(pools)))


def advise_pools(spec: RunSpec, compared: PoolsPlan) -> Iterator[str]:
    """Yield what fits where no layout over all pools does: fewer pools, or a change of the recipe."""
    for choice in compared.choices:
        if choice.layout is not None and choice.step_time_s is not None:
            step = format_duration(choice.step_time_s)
            yield f"{_name(choice)} fits, with {step} a step in {choice.layout.describe()}"
    for words, changed in (("layout=auto recompute=auto", OPEN[1](spec)), ("offload=optimizer", OFFLOADED[1](spec))):
        if changed != spec and (best := plan_pools(changed, shown=1).best):
            yield f"{words} fits, with {format_duration(best.step_time_s)} a step in {best.layout.describe()}"


def _on_all(spec: RunSpec, names: Sequence[str], capacity: CapacityPlan) -> Iterator[PoolChoice]:
    """Yield the best plan of each way to divide the work over all pools, the better one first."""
    seen = set()
    for candidate in capacity.candidates:
        if candidate.fits and (division := division_of(candidate)) not in seen:
            seen.add(division)
            yield _choice(spec, capacity, candidate, names, division)
    if not seen:
        yield _choice(spec, capacity, None, names, "samples")


def division_of(candidate: Candidate) -> str:
    """Return what the pools of a candidate share: the `samples` of a step, or the `layers` of the model."""
    return "layers" if candidate.pipelines_cross_pools else "samples"


def _on_some(spec: RunSpec, pools: Sequence[PoolSpec], names: Sequence[str]) -> PoolChoice:
    some = on_pools(spec, pools)
    if len(pools) > 1:
        capacity = plan_pools(some, shown=1)
    else:
        some, capacity = plan_on_what_divides(some)
    best = capacity.best
    return _choice(some, capacity, best, names, division_of(best) if best and best.pools else "alone")


def _choice(
    spec: RunSpec, capacity: CapacityPlan, best: Candidate | None, names: Sequence[str], division: str
) -> PoolChoice:
    if best is None:
        return PoolChoice(tuple(names), capacity.world_size, division, None, None, None, None, None, None)
    run = forecast_run(spec, capacity, best)
    return PoolChoice(
        pools=tuple(names),
        devices=capacity.world_size,
        division=division,
        layout=best.layout,
        step_time_s=best.step_time_s,
        tokens_per_s=best.tokens_per_s,
        wall_time_s=run.wall_time_s.value,
        usd_per_token=run.cost_usd.value / run.tokens if run.cost_usd else None,
        joules_per_token=run.energy_joules.value / run.tokens if run.energy_joules else None,
    )


def _verdict(choices: Sequence[PoolChoice], pools: int) -> str:
    """Say whether fewer pools are faster, or cheaper for each token; by how much, and which ones."""
    whole = next(choice for choice in choices if len(choice.pools) == pools)
    fewer = [choice for choice in choices if len(choice.pools) < pools and choice.tokens_per_s]
    if not whole.tokens_per_s:
        fitting = max(fewer, key=lambda choice: choice.tokens_per_s or 0.0, default=None)
        return (
            f"no layout over all pools fits; {_name(fitting)} is the fastest that does" if fitting else "nothing fits"
        )
    said = [_compare("faster", "slower", _gains(fewer, whole, "tokens_per_s"))]
    said.append(_compare("cheaper for each token", "dearer for each token", _gains(fewer, whole, "usd_per_token")))
    return "; ".join(line for line in said if line)


def _gains(fewer: Sequence[PoolChoice], whole: PoolChoice, figure: str) -> tuple[PoolChoice, float] | None:
    """Return the best of the fewer pools by a figure, and how many times as good it is as all pools; None where that is
    not known."""
    of_all = getattr(whole, figure)
    known = [(choice, getattr(choice, figure)) for choice in fewer]
    ratios = [(choice, own / of_all if figure == "tokens_per_s" else of_all / own) for choice, own in known if own]
    return max(ratios, key=lambda pair: pair[1], default=None) if of_all else None


def _compare(better: str, worse: str, best: tuple[PoolChoice, float] | None) -> str:
    if best is None:
        return ""
    choice, ratio = best
    if ratio > 1 + SAME:
        return f"{_name(choice)} is {_percent(ratio, better)}{better} than all pools"
    if ratio > 1 - SAME:
        return f"{_name(choice)} is neither {better} nor {worse} than all pools"
    return f"all pools are {_percent(1 / ratio, better)}{better} than {_name(choice)}"


def _percent(ratio: float, better: str) -> str:
    """`1.5 -> 50%`: how much more a rate is, or how much less a price."""
    part = ratio - 1 if better == "faster" else 1 - 1 / ratio
    return f"{part:.1%} "


def _name(choice: PoolChoice) -> str:
    return " + ".join(choice.pools) + (" alone" if len(choice.pools) == 1 else "")
