"""Labels of a plan: the names of its parts in display order, and its quantities as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.printable import GIB, format_count, format_duration, format_params, format_si
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.blueprint import Blueprint, PlanesPlan, PoolsPlan
from trainspec_cli.recipe.results.forecast import Goodput, Interval, RunForecast, Simulation
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan

if TYPE_CHECKING:
    from trainspec_cli.reporter.plan.trace import TraceReport


# The reports of a plan and of a sweep, which the terminal, the page and JSON all show.


@dataclass(frozen=True)
class PlanSection:
    """A plug-in's section of a plan: a table with text below it."""

    key: str
    """The key of the section's results in the plan's JSON."""
    figures: JsonObject
    title: str
    about: str
    """Text that follows the title."""
    headings: tuple[str, ...]
    """The first two columns are text, the others are numbers."""
    rows: tuple[tuple[str, ...], ...]
    text: str
    known: str
    """The uncertainty of the results, with the source."""


@dataclass(frozen=True)
class PlanReport:
    """A plan with its optional parts."""

    spec: RunSpec
    capacity: CapacityPlan
    run: RunForecast | None = None
    """None if no layout fits; then `capacity.advice` names changes that would make one fit."""
    blueprint: Blueprint | None = None
    planes: PlanesPlan | None = None
    sections: tuple[PlanSection, ...] = ()
    """Sections from the plug-ins that the recipe uses."""
    simulation: Simulation | None = None
    trace: TraceReport | None = None
    pools: PoolsPlan | None = None
    """If the cluster has several pools, plans on subsets of them."""
    defaults: tuple[str, ...] = ()
    """Overrides that were assumed because no recipe was specified."""

    profile: str = ""
    """The changes made by the cluster's profile, or why it was not used; empty without a profile."""

    @property
    def best(self) -> Candidate | None:
        return self.capacity.best

    @property
    def rejected(self) -> dict[str, int]:
        """The number of rejected layouts by reason, most frequent first."""
        return dict(sorted(self.capacity.rejected.items(), key=lambda item: -item[1]))

    @property
    def device(self) -> str:
        """The accelerator's name, or the device type if the cluster names no accelerator."""
        cluster = self.spec.cluster
        if cluster.pools:
            return " + ".join(dict.fromkeys(pool.accelerator.name for pool in cluster.pools))
        return cluster.accelerator.name if cluster.accelerator else cluster.device


@dataclass(frozen=True)
class SweepPoint:
    values: dict[str, str]
    """The value of each swept key."""
    plan: PlanReport

    @property
    def value(self) -> str:
        return ", ".join(self.values.values())


@dataclass(frozen=True)
class SweepReport:
    """One plan for each combination of the swept keys' values, or for each of several recipes."""

    points: tuple[SweepPoint, ...]

    @property
    def title(self) -> str:
        return f"Plans by {self.key}"

    @property
    def key(self) -> str:
        return ", ".join(self.points[0].values)


UNKNOWN = "unknown"
Formatter = Callable[[float], str]
"""A function that formats a quantity."""

MEMORY_PARTS = {
    "parameters_bytes": "parameters",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "feedback_bytes": "error feedback",
    "activations_bytes": "activations",
    "logits_bytes": "logits",
    "comm_buffers_bytes": "communication buffers",
    "fragmentation_bytes": "fragmentation",
    "context_bytes": "device context",
}
TIME_PARTS = {
    "matmul_s": "matrix products",
    "attention_s": "attention",
    "memory_bound_s": "memory-bound kernels",
    "recompute_s": "recomputation",
    "optimizer_s": "optimizer",
    "tp_comm_s": "tensor-parallel communication",
    "cp_comm_s": "context-parallel communication",
    "ep_comm_s": "expert-parallel communication",
    "pp_comm_s": "pipeline communication",
    "dp_comm_s": "data-parallel communication",
    "bubble_s": "pipeline bubble",
    "data_s": "data wait",
    "host_s": "host",
}
OVERHEADS = tuple(key for key in TIME_PARTS if key not in ("matmul_s", "attention_s"))
"""The phases of a step other than the model's matmuls and attention."""
LOST_PARTS = {
    "restart": "job down, starting again",
    "rework": "work undone by failures",
    "checkpoint": "writing checkpoints",
    "stall": "survivors waiting",
    "shrunk": "replica groups missing",
    "dip": "network slower while links flap",
}
MODES = {"restart": "restart from checkpoints", "elastic": "shrink and heal"}
AXES = (
    ("dp_replicate", "replicate"),
    ("dp_shard", "shard"),
    ("tp", "tp"),
    ("cp", "cp"),
    ("pp", "pp"),
    ("ep", "ep"),
    ("etp", "etp"),
)


def present(
    breakdown: Mapping[str, float], names: Mapping[str, str], least: float = 5e-4
) -> list[tuple[str, str, float]]:
    """Return (key, name, value) for the parts that exceed the fraction `least` of the total. The page and the table
    omit the other parts."""
    whole = sum(breakdown.values()) or 1.0
    return [(key, name, breakdown[key]) for key, name in names.items() if breakdown.get(key, 0.0) / whole > least]


def layout_label(layout: Layout) -> str:
    """`replicate 32 · tp 8 · pp 8 interleaved x2 · zero 1`: the axes larger than 1."""
    words = [f"{name} {getattr(layout, axis)}" for axis, name in AXES if getattr(layout, axis) > 1]
    if layout.pp > 1:
        chunks = f" x{layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        words.append(f"{layout.pipeline_schedule.replace('_', '-')}{chunks}")
    # A ZeRO stage is meaningless without sharding.
    if layout.dp_shard > 1:
        words.append(f"zero {layout.zero_stage}")
    return " · ".join(words) or "one device"


def placed_label(candidate: Candidate) -> str:
    """Return the layout and, with several pools, each pool's part: `samples 864 + 160`, or `layers 27 + 5`."""
    layout = layout_label(candidate.layout)
    shared = "layers" if candidate.pipelines_cross_pools else "samples"
    parts = " + ".join(f"{getattr(part, shared):,}" for part in candidate.pools)
    return f"{layout} · {shared} {parts}" if candidate.pools else layout


def cut_label(layout: Layout) -> str:
    return stages_label(layout.stage_layers) if layout.pp > 1 else ""


def stages_label(stage_layers: Sequence[int] | None) -> str:
    """`10 x 6, 11, 9`: the number of layers in each pipeline stage; empty for the even layer split."""
    runs = ((layers, sum(1 for _ in run)) for layers, run in groupby(stage_layers or ()))
    return ", ".join(f"{layers} x {number}" if number > 1 else str(layers) for layers, number in runs)


def micro_batch_label(candidate: Candidate) -> str:
    """`2 x 8`: samples per micro-batch, micro-batches per step."""
    return f"{candidate.micro_batch_size:g} x {candidate.grad_accum_steps}"


def batch_label(plan: PlanReport) -> str:
    """`1,024`, or `1,024 to 8,192` if the batch grows."""
    sizes = [batch.step_samples for batch in plan.run.batches] if plan.run else []
    first = f"{plan.spec.batching.global_batch_size:,}"
    return f"{first} to {max(sizes):,}" if sizes else first


def candidate_cells(candidate: Candidate) -> tuple[str, ...]:
    """Return (layout, micro-batch, recompute, step, units/s/device, MFU, HFU)."""
    rate = format_rate(candidate.tokens_per_s_per_gpu)
    return (
        placed_label(candidate),
        micro_batch_label(candidate),
        recompute_label(candidate),
        format_duration(candidate.step_time_s),
        rate,
        percent(candidate.mfu, 1),
        percent(candidate.hfu, 1),
    )


def recompute_label(candidate: Candidate) -> str:
    """Describe what the layout recomputes to save memory, and whether its optimizer state is in host memory."""
    return candidate.recompute + ", offload" * (candidate.offload == "optimizer")


def sweep_figures(best: Candidate, run: RunForecast, first: Candidate, unit: str) -> dict[str, str]:
    """Return the figures of a point of a sweep by heading. Scaling is the throughput per device relative to `first`;
    money is also given per million tokens or samples (`unit`)."""
    energy, money, carbon = run.energy_joules, run.cost_usd, run.carbon_kg
    return {
        "step": format_duration(best.step_time_s),
        f"{unit}/s": format_rate(best.tokens_per_s),
        "scaling": percent(best.tokens_per_s_per_gpu / first.tokens_per_s_per_gpu),
        "MFU": percent(best.mfu, 1),
        "goodput": goodput_percent(run.goodput.goodput.value),
        "time": format_duration(run.wall_time_s.value),
        "money": format_money(money.value) if money else UNKNOWN,
        f"per M {unit}": f"${money.value / run.tokens * 1e6:.3g}" if money else UNKNOWN,
        "energy": format_energy(energy.value) if energy else UNKNOWN,
        "CO2e": format_mass(carbon.value) if carbon else UNKNOWN,
    }


def engine_label(plan: PlanReport) -> str:
    """Return the engine and what determines its speed: number formats, compilation and the optimizer. A plan for
    hardware on which trainspec's engine has not been measured says so."""
    spec = plan.spec
    framework = spec.framework
    chip = spec.cluster.accelerator
    formats: str = spec.precision.compute
    if formats == "auto":
        formats = "fp16" if chip and not chip.bf16_tflops else "bf16"
    if spec.precision.matmul != "compute":
        formats += f" with {spec.precision.matmul} matrix products"
    how = (f"{framework.name} {framework.version}".rstrip(), formats, "compiled" if spec.compile else "eager")
    text = ", ".join((*how, spec.optim.name))
    is_gpu = bool(spec.cluster.pools) or (chip is not None and chip.vendor != "cpu")
    if framework.counted and is_gpu and not plan.profile:
        text += f"; not measured on {plan.device} yet: the forecast rests on other engines' measurements"
    return text


def devices_label(plan: PlanReport) -> str:
    cluster = plan.spec.cluster
    pools = [(pool.num_nodes * pool.devices_per_node, pool.accelerator.name, pool.num_nodes) for pool in cluster.pools]
    pools = pools or [(plan.capacity.world_size, plan.device, cluster.num_nodes)]
    return " + ".join(f"{devices:,} {name} on {nodes:,} node{'s' * (nodes != 1)}" for devices, name, nodes in pools)


def model_label(plan: PlanReport) -> str:
    model = plan.spec.model
    params = plan.capacity.params
    active_params = plan.capacity.active_params
    active = f", {format_count(active_params)} active" if active_params < params else ""
    return f"{model.name or model.family}, {format_params(params, plan.capacity.adapter_params)}{active}"


def defaults_label(plan: PlanReport) -> str:
    """Return the values that were assumed in the absence of a recipe, as overrides."""
    return f"{' '.join(plan.defaults)}, and the rest of recipe=plan_defaults"


def format_rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(part: float, digits: int = 0) -> str:
    return f"{100 * part:.{digits}f}%"


def chance(candidate: Candidate) -> str:
    """Return the probability that a layout fits, such as `93%`; never 0% or 100%."""
    probability = candidate.fit_probability
    # A prediction is never certain, so the value is not rounded to 0% or 100%.
    return ">99%" if probability >= 0.995 else "<1%" if probability < 0.005 else percent(probability)


def choice_lines(capacity: CapacityPlan) -> list[tuple[str, str]]:
    """Return (heading, text) pairs that explain why the first layout was chosen, and compare it with an expert's usual
    starting point."""
    best = capacity.best
    fastest = capacity.fastest
    usual = capacity.usual
    # If there is only one layout, there is nothing to explain.
    if best is None or fastest is None or len(capacity.candidates) == 1:
        return []
    why = "the fastest; no simpler layout is within 10% of it"
    if fastest is not best:
        why = f"the simplest within 10% of the fastest, {layout_label(fastest.layout)} ({_compared(fastest, best)})"
    why += "; predictions do not rank layouts more finely than that"
    lines = [("Chosen", why)]
    if usual is best:
        lines.append(("Usual start", "the chosen layout"))
    elif usual is not None:
        lines.append(("Usual start", f"{_described(usual)}: {_compared(usual, best)}"))
    return lines


def _described(candidate: Candidate) -> str:
    how = f"{micro_batch_label(candidate)} samples, recompute {recompute_label(candidate)}"
    return f"{layout_label(candidate.layout)} · {how}"


def _compared(other: Candidate, best: Candidate) -> str:
    change = other.step_time_s / best.step_time_s - 1
    difference = f"{percent(abs(change), 1)} {'less' if change < 0 else 'more'}"
    return f"{format_duration(other.step_time_s)} per step, {difference}"


def safest_label(best: Candidate, safest: Candidate) -> str:
    """Describe the layout that is most likely to fit, among those that are about as fast as the best one."""
    if safest == best:
        return f"the first, which fits at {chance(best)}"
    return (
        f"{_described(safest)}: fits at {chance(safest)} with {gib(safest.peak_memory_bytes)} GiB, "
        f"{_compared(safest, best)}"
    )


def goodput_percent(part: float) -> str:
    return percent(part, 1)


def alternative_label(other: Goodput) -> str:
    """Describe the other recovery mode, with the duration that the run would have."""
    layout = f" in {other.layout}" if other.layout else ""
    return f"with resilience={other.mode}{layout}: {format_duration(other.wall_time_s)}"


def format_energy(joules: float) -> str:
    """Format an energy in watt-hours, the unit of electricity bills."""
    return format_si(joules / 3600, "Wh")


def format_mass(kilograms: float) -> str:
    if kilograms < 1:
        return f"{kilograms * 1000:.3g} g"
    return f"{kilograms:.3g} kg" if kilograms < 1000 else f"{format_grouped(kilograms / 1000)} t"


def format_money(usd: float) -> str:
    if usd < 1000:
        return f"${usd:,.2f}"
    return f"${format_count(usd)}"


def format_grouped(value: float) -> str:
    """Format with three significant digits and thousands separators: `11400` -> `11,400`."""
    return f"{float(f'{value:.3g}'):,.12g}"


def format_range(interval: Interval | None, say: Formatter) -> str:
    return f"{say(interval.low)} to {say(interval.high)}" if interval else ""


def gib(value: float) -> str:
    return f"{value / GIB:.1f}"
