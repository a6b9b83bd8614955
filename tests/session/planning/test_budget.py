"""Budgets of recipes and of files of runs, and the errors in them."""

from pathlib import Path

import pytest

from trainspec_cli.core.errors import PlanError, RecipeError
from trainspec_cli.session.planning.budget import budget_portfolio

RECIPE = ["recipe=llama3_8b", "cluster.num_nodes=8", "layout=fsdp", "cost=owned"]
ONE = "recipe=llama3_8b cluster.num_nodes=8 layout=fsdp cost=owned"


def problems_of(arguments: list[str], **options: float) -> list[tuple[str | None, str, str | None]]:
    with pytest.raises(RecipeError) as caught:
        budget_portfolio(arguments, **options)  # type: ignore[arg-type]
    return [(problem.path, problem.message, problem.hint) for problem in caught.value.problems]


def write(folder: Path, text: str) -> str:
    (folder / "runs.yaml").write_text(text)
    return str(folder / "runs.yaml")


def test_one_recipe_and_a_file_of_it_are_the_same(tmp_path: Path) -> None:
    file = write(tmp_path, f"years: 3\nruns:\n  - {{plan: {ONE}, per_year: [6]}}\n")
    assert budget_portfolio([file]) == budget_portfolio(RECIPE, 6, 3)


@pytest.mark.slow
def test_spot_takes_longer_and_the_more_often_it_is_taken_back_the_longer() -> None:
    """A node that is taken back is missing until it is replaced, because no spare is assumed."""
    run = budget_portfolio(RECIPE).runs[0]
    often = budget_portfolio([*RECIPE, "cluster.cost.spot_mtbf_device_hours=300"]).runs[0]
    assert run.spot_wall_s is not None and often.spot_wall_s is not None
    assert run.wall_s < run.spot_wall_s < 1.02 * run.wall_s < often.spot_wall_s
    assert often.wall_s == run.wall_s
    never = budget_portfolio([*RECIPE, "cluster.cost.spot_mtbf_device_hours=0.1"])
    assert never.runs[0].spot_wall_s is None and "spot" not in never.usd


@pytest.mark.slow
def test_what_follows_a_file_changes_all_its_runs(tmp_path: Path) -> None:
    file = write(tmp_path, f"runs:\n  - {{plan: {ONE}}}\n  - {{plan: {ONE} train.max_steps=20000, name: short}}\n")
    plain, dear = budget_portfolio([file]), budget_portfolio([file, "cluster.cost.device_price_usd=80000"])
    assert [run.name for run in plain.runs] == ["llama3_8b", "short"]
    assert dear.years[0].owned_usd["machines"] == 2 * plain.years[0].owned_usd["machines"]


def test_a_missing_price_names_the_key_to_give() -> None:
    (path, message, hint), *more = problems_of(["recipe=llama3_8b", "cluster.num_nodes=8", "layout=fsdp"])
    assert path == "cluster.cost.device_price_usd" and "H100-SXM-80GB" in message
    assert hint is not None and "cluster.cost.device_price_usd=<" in hint
    assert not more
    free = problems_of([*RECIPE, "cluster.accelerator.price_usd_per_hour=0", "cluster.accelerator.tdp_w=0"])
    assert [path for path, _, _ in free] == ["cluster.cost.price_usd_per_device_hour", "cluster.accelerator.tdp_w"]


@pytest.mark.parametrize(
    ("change", "path", "said"),
    [
        ("cluster.cost.device_price_usd=-1", "cluster.cost.device_price_usd", "is -1; "),
        (
            "cluster.cost.utilisation=1.2",
            "cluster.cost.utilisation",
            "is 1.2; ",
        ),
        (
            "cluster.cost.resale_ratio=2",
            "cluster.cost.resale_ratio",
            "is 2; ",
        ),
        ("cluster.site.pue=0.9", "cluster.site.pue", "is 0.9; "),
    ],
)
def test_values_out_of_their_range_are_refused(change: str, path: str, said: str) -> None:
    found = {each: message for each, message, _ in problems_of([*RECIPE, change])}
    assert said in found[path]


def test_wrong_options_and_files_say_what_is_wrong(tmp_path: Path) -> None:
    assert problems_of(RECIPE, years=0)[0][1].startswith("--years is 0; ")
    assert problems_of(RECIPE, per_year=-2)[0][1].startswith("--per-year is")
    assert problems_of([str(tmp_path / "none.yaml")])[0][1].startswith("no such file: ")
    for text, path in (
        ("years: 4\n", "runs"),
        ("runs: []\n", "runs"),
        (f"runs:\n  - {{plan: {ONE}, per_year: [-1]}}\n", "runs.0.per_year"),
        (f"runs:\n  - {{plan: {ONE}, per_year: []}}\n", "runs.0.per_year"),
        (f"runs:\n  - {{plan: {ONE}, often: 2}}\n", "runs.0.often"),
        (f"years: 99\nruns:\n  - {{plan: {ONE}}}\n", "years"),
    ):
        assert [each for each, _, _ in problems_of([write(tmp_path, text)])] == [path]


@pytest.mark.slow
def test_runs_on_other_machines_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, f"runs:\n  - {{plan: {ONE}}}\n  - {{plan: {ONE} cluster=a100_80gb}}\n")
    assert {path for path, _, _ in problems_of([file])} == {"cluster.accelerator"}


def test_a_run_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="fits on 8"):
        budget_portfolio(["recipe=llama3_70b", "cluster.num_nodes=1", "layout=fsdp", "cost=owned"])
