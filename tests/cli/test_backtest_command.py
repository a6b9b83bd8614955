"""`trainspec backtest`: the JSON that others read, the profile it writes and reads, the plot."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from trainspec_cli.__main__ import run
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.validation import backtest as backtest_module
from trainspec_cli.planner.validation import table as table_module
from trainspec_cli.planner.validation.columns import COLUMNS, EXAMPLE

TABLE = Path(__file__).parents[1] / "data" / "measured" / "throughput.csv"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Every fortieth row."""
    with TABLE.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))[::40]
    path = tmp_path / "runs.csv"
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_json_has_the_keys_others_rely_on(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["backtest", str(table), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"rows", "predicted", "refused", "step_time_mape", "step_time_median_ape", "bias", "by_source"} <= set(
        found["summary"]
    )
    keys = {"id", "predicted_step_time_s", "measured_step_time_s", "predicted_tokens_s_gpu", "peak_memory_bytes"}
    assert all({*keys, "refused"} <= set(row) for row in found["rows"])
    assert len(found["rows"]) == found["summary"]["rows"] == 30


def test_text_shows_errors_and_what_was_assumed(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["backtest", str(table)]) == 0
    shown = capsys.readouterr().out
    assert "mean error" in shown and "mosaicml/llm-foundry" in shown and "assumed" in shown


@pytest.mark.slow
def test_a_fitted_profile_predicts_better(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "mine.yaml"
    assert run(["backtest", str(table), "--json", "--fit", str(profile)]) == 0
    shipped = json.loads(capsys.readouterr().out)["summary"]
    assert shipped["fitted"]["rows"] == shipped["judged"] and shipped["unseen"] is None
    assert profile.read_text(encoding="utf-8").splitlines()[1] == "efficiency:"
    assert run(["backtest", str(table), "--json", "--profile", str(profile)]) == 0
    fitted = json.loads(capsys.readouterr().out)["summary"]
    assert fitted["step_time_mape"] < shipped["step_time_mape"]
    assert fitted["fitted"] is None, "what a profile was fitted to is not known"


def test_the_plot_holds_a_dot_a_run(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.svg"
    assert run(["backtest", str(table), "--json", "--plot", str(plot)]) == 0
    judged = json.loads(capsys.readouterr().out)["summary"]["judged"]
    assert plot.read_text(encoding="utf-8").count('fill-opacity="0.6"') == judged


def test_a_missing_table_ends_with_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["backtest", str(tmp_path / "none.csv")]) == 2
    assert "no such file: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("efficiency:\n  warp: 9\n", "warp"),
        ("efficiency:\n  matmul: -1\n", "above 0"),
        ("efficiency:\n  matmul: null\n", "above 0"),
        ("matmul: 0.9\n", "`efficiency`"),
    ],
)
def test_no_profile_ends_with_exit_2(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, says: str
) -> None:
    profile = tmp_path / "odd.yaml"
    profile.write_text(content, encoding="utf-8")
    assert run(["backtest", str(table), "--profile", str(profile)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "gpu,n_gpus\n", "gpu,model\nH100,x\n"])
def test_what_is_no_table_of_runs_is_told(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_text(content)
    assert run(["backtest", str(tmp_path / "t.csv"), "--json"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert (error["code"], error["line"]) == ("wrong_table", 1)


def test_short_and_long_lines_are_read_as_far_as_they_go(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, first, *_ = table.read_text().splitlines()
    assert run(["backtest", str(table), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)["rows"][0]
    table.write_text(f"{head}\n{first},more,and more\n{first.split(',')[0]}\n")
    assert run(["backtest", str(table), "--json"]) == 0
    long, short = json.loads(capsys.readouterr().out)["rows"]
    assert long["predicted_step_time_s"] == whole["predicted_step_time_s"]
    assert short["refused"]


@pytest.mark.parametrize("value", ["0", "-1", ".inf", ".nan", "fast", "[1]"])
def test_an_efficiency_is_a_number_above_0(
    table: Path, tmp_path: Path, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = next(iter(Efficiency().as_dict()))
    (tmp_path / "p.yaml").write_text(f"efficiency:\n  {name}: {value}\n")
    assert run(["backtest", str(table), "--profile", str(tmp_path / "p.yaml"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["errors"][0]["code"] == "wrong_profile"


def test_a_template_is_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.csv"
    assert run(["backtest", "--template", str(file)]) == 0
    capsys.readouterr()
    assert run(["backtest", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["judged"] == 1
    before = file.read_bytes()
    assert run(["backtest", "--template", str(file)]) == 2 and file.read_bytes() == before


def test_columns_that_nobody_reads_are_refused(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = table.read_text()
    table.write_text(text.replace("tokens_s_gpu", "tokens_per_gpu", 1))
    assert run(["backtest", str(table), "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["errors"]
    assert (problem["code"], problem["line"]) == ("unknown_key", 1) and "tokens_per_gpu" in problem["message"]


def test_derived_figures_do_not_suffice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.csv"
    row = {**EXAMPLE, "tokens_s_gpu": "", "mfu_pct": "45"}
    file.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    assert run(["backtest", str(file), "--json"]) == 0
    assert "mfu_pct" in json.loads(capsys.readouterr().out)["rows"][0]["refused"]


def test_every_column_that_is_read_is_described() -> None:
    read = "".join(Path(module.__file__ or "").read_text() for module in (table_module, backtest_module))
    columns = set(re.findall(r'(?:row\.get\(|number\(row, |need\(row, |whole\(row, |row\[)"(\w+)"', read))
    assert len(columns) > 40 and columns <= COLUMNS.keys()
