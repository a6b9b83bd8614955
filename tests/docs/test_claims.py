"""docs/claims.md is what tests/bench/claims.py makes of tests/data/claims.yaml today."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.bench.claims import (
    CLAIMS,
    PAGE,
    QUANTITIES,
    VERDICTS,
    Claim,
    Figure,
    count_keys,
    evaluate,
    judge_claims,
    read_measured,
    render,
    summarise_published,
)

GIVEN: dict[str, Any] = yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))


def figures() -> Iterator[dict[str, Any]]:
    for claim in GIVEN["claims"]:
        yield from claim["figures"]


def test_the_page_has_every_claim_and_every_figure_in_its_place() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", page, re.MULTILINE)[:-1] == [claim["name"] for claim in GIVEN["claims"]]
    claims = page.partition("\n## ")[2].partition("\n## Published goodput")[0]
    shown = re.findall(r"^- (.+): [^:]+, ([a-z ]+)(?:; yes|; no)?$", claims, re.MULTILINE)
    assert [what for what, _ in shown] == [figure["of"] for figure in figures()]
    origins = {"planned", "simulated", "measured", "published", "counted"}
    assert {how for _, how in shown} == origins
    assert set(re.findall(r"^\*\*(.+?)\.\*\* ", page, re.MULTILINE)) == {
        each[0].upper() + each[1:] for each in VERDICTS
    }


def test_names_of_expressions_mean_something_and_every_plan_is_used() -> None:
    used = set()

    def find(room: str, name: str) -> float:
        used.add(room)
        if room in GIVEN["plans"]:
            assert name in QUANTITIES
        else:
            assert name in {**GIVEN["measured"], **GIVEN["published"], **count_keys()}
        return 1.0

    for figure in figures():
        evaluate(figure["value"], find)
    assert used == {*GIVEN["plans"], "measured", "published", "recipe"}


def test_results_stand_in_no_sentence() -> None:
    for claim in GIVEN["claims"]:
        assert not re.search(r"\d%|\$\d", claim["reason"])


@pytest.mark.parametrize("name", GIVEN["measured"])
def test_measured_figures_are_found_where_they_stand(name: str) -> None:
    assert read_measured(**GIVEN["measured"][name]) > 0


def test_a_measured_figure_that_is_gone_or_stands_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="0 places"):
        read_measured("docs/claims.md", "no such (figure)")


def test_published_runs_are_summed_up() -> None:
    median = summarise_published("mfu_pct", {"gpu": "H100-SXM-80GB", "dtype": "bf16"}, "median")
    assert 30 < median < summarise_published("mfu_pct", {"gpu": "H100-SXM-80GB", "dtype": "bf16"}, "max") < 60


def test_a_verdict_follows_from_the_figures_that_decide() -> None:
    def claim(*holds: bool | None) -> Claim:
        return Claim("", tuple(Figure(str(place), "", 1.0, "1", each) for place, each in enumerate(holds)), "", "")

    assert [claim(True, None).verdict, claim(True, False).verdict] == ["holds", "partly holds"]
    assert [claim(False, None).verdict, claim(None).verdict] == ["does not hold", "undecided"]


def test_the_live_scheduler_which_does_nothing_on_gpus_proves_no_claim() -> None:
    assert not [plan for plan in GIVEN["plans"].values() if "disturb=" in plan or "scheduler=" in plan]


def test_expressions_are_arithmetic_and_nothing_else() -> None:
    assert evaluate("2 * (a.b - 1) / 4", lambda room, name: 9.0) == 4.0
    for text in ("open('x')", "a.b.c", "a ** 2", "-a"):
        with pytest.raises(ValueError, match="is not a number"):
            evaluate(text, lambda room, name: 1.0)


def test_keys_that_take_auto_are_counted() -> None:
    counted = count_keys()
    assert counted["auto_tuning_keys"] <= counted["auto_keys"] < counted["keys"]
    assert counted["auto_tuning_keys"] < counted["tuning_keys"] < counted["keys"]
    assert counted["keys"] > 300


@pytest.mark.slow
def test_the_page_is_current() -> None:
    assert render(judge_claims(GIVEN)) == PAGE.read_text(encoding="utf-8"), "python tests/bench/claims.py --write"
