"""Render a budget: tables for the terminal, and a page with charts for a finance department."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from trainspec_cli.core.printable import aligned, format_count, format_duration, printable
from trainspec_cli.recipe.results.tables import WAYS, Budget, Sensitivity, Way
from trainspec_cli.reporter.page.parts import (
    PageOrigin,
    bar_rows,
    heading,
    origin_line,
    render_page,
    section,
    text_table,
    tiles,
)
from trainspec_cli.reporter.page.svg import LineSeries, Segment, render_bar, render_curves, render_legend
from trainspec_cli.reporter.plan.labels import format_money, percent

NAMES: Mapping[Way, str] = {
    "owned": "buy",
    "on_demand": "rent by the hour",
    "reserved": "rent by the year",
    "spot": "rent on spot",
}
PARTS = ("machines", "operation", "staff", "space", "electricity", "resale")
LINES: Mapping[Way, str] = {
    "owned": "c-measure",
    "on_demand": "c-heldout",
    "reserved": "c-ideal",
    "spot": "c-spot",
}
FOOTER = (
    "Budgeted by trainspec. Prices are assumed to stay the same, and interest is ignored; the cost of buying "
    "is reduced by what the machines are still worth at the end. The runs' times include down time, checkpoints "
    "and repeated work."
)
Rows = Sequence[Sequence[str]]


def render_budget(budget: Budget) -> str:
    blocks = ["\n".join([title_of(budget), *sentences(budget)])]
    for title, text, rows in _tables(budget):
        blocks.append("\n".join([f"{title}  {text}".rstrip(), *aligned(rows, range(1, len(rows[0])))]))
    return printable("\n\n".join(blocks))


def title_of(budget: Budget) -> str:
    most = max(year.fleet_devices for year in budget.years)
    return f"{most:,} {budget.accelerator} for {len(budget.years)} years"


def sentences(budget: Budget) -> Iterator[str]:
    """Yield the conclusions: which option is cheapest, and when buying pays off."""
    cheapest = next(way for way in WAYS if way == budget.cheapest)
    yield f"cheapest     {NAMES[cheapest]}, {format_money(budget.usd[cheapest])} in total"
    months = budget.break_even_months
    use = budget.break_even_utilisation
    after = "not within these years" if months is None else f"after {months:.1f} months, versus renting by the hour"
    yield f"buying pays  {after}"
    above = "at no utilisation" if use is None else f"above a utilisation of {percent(use, 1)} over the machines' life"
    yield f"             {above}"


def _tables(budget: Budget) -> Iterator[tuple[str, str, Rows]]:
    ways = [way for way in WAYS if way in budget.usd]
    yield (
        "Devices",
        "",
        [
            ("year", "device-hours", "needed", "bought", "sold", "utilisation"),
            *(
                (
                    str(year.year),
                    f"{year.device_hours:,.0f}",
                    f"{year.fleet_devices:,}",
                    f"{year.bought_devices:,}",
                    f"{year.sold_devices:,}",
                    percent(year.utilisation),
                )
                for year in budget.years
            ),
        ],
    )
    yield (
        "Cash per year",
        "machines are paid for when they are bought",
        [
            ("year", *(NAMES[way] for way in ways)),
            *((str(year.year), *(_money(year.usd[way]) for way in ways)) for year in budget.years),
            ("worth at the end", _money(0.0 - budget.worth_usd), *("" for _ in ways[1:])),
            ("total", *(_money(budget.usd[way]) for way in ways)),
        ],
    )
    yield (
        "Buying, by cause",
        "",
        [
            ("year", *PARTS),
            *((str(year.year), *(_money(year.owned_usd[part]) for part in PARTS)) for year in budget.years),
        ],
    )
    names = [NAMES[way] for way in ways]
    of_runs: list[Sequence[str]] = [("run", "per year", "devices", "time", "on spot", *names)]
    for run in budget.runs:
        times = " ".join(f"{each:g}" for each in dict.fromkeys(run.per_year))
        spot = "never ends" if run.spot_wall_s is None else format_duration(run.spot_wall_s)
        costs = (_money(run.usd[way]) for way in ways)
        of_runs.append((run.name, times, f"{run.devices:,}", format_duration(run.wall_s), spot, *costs))
        each_million = (f"${run.usd_per_million_tokens[way]:.4f}" for way in ways)
        of_runs.append(("", "", "", f"{format_count(run.tokens)} tokens", "", *each_million))
    yield "Each run", "its share of all costs, in proportion to device-hours; below, $ per million tokens", of_runs
    rows: list[Sequence[str]] = [("input", "from", *names, "to", *names)]
    for each in budget.sensitivities:
        low, high = ([_money(usd[way]) for way in ways if way in usd] for usd in (each.low_usd, each.high_usd))
        rows.append((each.key, f"{each.low:.4g}", *low, f"{each.high:.4g}", *high))
    yield "What matters", "in total, with one input at its bounds", rows


def _money(usd: float) -> str:
    return f"-{format_money(-usd)}" if usd < 0 else format_money(usd)


def render_budget_page(budget: Budget, origin: PageOrigin | None = None) -> str:
    totals = [
        (
            NAMES[way],
            format_money(budget.usd[way]),
            "in total, minus the remaining value" if way == "owned" else "in total",
        )
        for way in WAYS
        if way in budget.usd
    ]
    # Draw each option's cash flow over the months.
    lines = [
        LineSeries(LINES[way], NAMES[way], list(enumerate(budget.cumulated_usd[way])), marked=False)
        for way in WAYS
        if way in budget.cumulated_usd
    ]
    legend = render_legend([Segment(line.kind, line.label, 0, "") for line in lines])
    text = "Cash paid up to each month. Machines are bought in the first month of the year that needs them."
    # The conditions under which buying pays off, as (label, value, unit).
    break_even = []
    months = budget.break_even_months
    use = budget.break_even_utilisation
    if months is None:
        break_even.append(("buying pays", "never", "versus renting by the hour"))
    else:
        break_even.append(("buying pays after", f"{months:.1f} months", "versus renting by the hour"))
    if use is None:
        break_even.append(("buying pays", "at no utilisation", "over the machines' life"))
    else:
        break_even.append(("buying pays above", percent(use, 1), "utilisation over the machines' life"))

    # The effect of each input on the savings from buying instead of renting by the hour.
    def saved(usd: Mapping[str, float]) -> float:
        return usd["on_demand"] - usd["owned"]

    def swing(each: Sensitivity) -> float:
        return abs(saved(each.high_usd) - saved(each.low_usd))

    # If no input changes anything, all bars have length 0; this avoids a division by 0.
    most = max((swing(each) for each in budget.sensitivities), default=0.0) or 1.0
    swings = [
        (
            each.key,
            render_bar([Segment("c-used", each.key, swing(each), _money(swing(each)))], most),
            f"{_money(saved(each.low_usd))} to {_money(saved(each.high_usd))}",
        )
        for each in sorted(budget.sensitivities, key=swing, reverse=True)
    ]
    swing_text = (
        "The savings from buying instead of renting by the hour, with one input at its lower and at its upper bound."
    )
    body = [
        heading(title_of(budget)),
        origin_line(origin),
        tiles([*totals, *break_even]),
        section("Cash over time", text, render_curves(lines, "months", "dollars") + legend),
        section("What the decision depends on", swing_text, bar_rows(swings)),
    ]
    for title, text, rows in _tables(budget):
        first, *numbers = rows[0]
        body.append(section(title, text, text_table((first, *(f"#{name}" for name in numbers)), rows[1:])))
    return render_page(title_of(budget), "".join(body), FOOTER)
