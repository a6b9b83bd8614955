"""`trainspec calibrate`: what it takes and refuses, and what later plans say of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from lab.problems import codes

from trainspec_cli.__main__ import run
from trainspec_cli.session.recipe.load import profile_path

TABLE = Path(__file__).parents[1] / "data" / "measured" / "throughput.csv"
PLAN = ("plan", "model=llama3_8b", "cluster=h100", "layout.tp=1", "layout.pp=1", "layout.cp=1", "--json")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def rows_file(tmp_path: Path, *numbers: str) -> Path:
    head, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    file = tmp_path / "rows.csv"
    file.write_text("\n".join([head, *(line for line in lines if line.split(",")[0] in numbers)]), encoding="utf-8")
    return file


def planned(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[float, str | None]:
    capsys.readouterr()
    assert run([*PLAN, *more]) == 0
    plan = json.loads(capsys.readouterr().out)
    return plan["best"]["step_time_s"], plan["profile"]


@pytest.mark.slow
def test_a_profile_changes_later_plans_which_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before_s, line = planned(capsys)
    assert line is None
    assert run(["calibrate", str(rows_file(tmp_path, "1", "2")), "--cluster", "h100", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["rows"], made["device"], made["error_after"] < made["error_before"]) == (2, "H100-SXM-80GB", True)
    assert made["parameters"]["conv"]["informed"] is False
    after_s, line = planned(capsys)
    assert after_s != before_s
    assert line is not None and line.startswith("profile of h100, ") and "2 measured steps: pace x " in line
    assert planned(capsys, "cluster.profile=off") == (before_s, None)
    assert planned(capsys, "cluster.num_nodes=2")[1] == line
    assert planned(capsys, "cluster.name=another")[1] is None
    assert run(["calibrate", "--show"]) == 0
    assert "as shipped: matmul_fp8" in capsys.readouterr().out
    assert run(["calibrate", "--forget"]) == 0
    assert planned(capsys) == (before_s, None)


@pytest.mark.parametrize("key", ["torch", "trainspec", "device"])
def test_a_profile_of_another_version_or_chip_is_not_used(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["calibrate", str(rows_file(tmp_path, "1")), "--cluster", "h100"]) == 0
    path = profile_path("h100")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump(content | {key: "another"}), encoding="utf-8")
    step_s, line = planned(capsys)
    assert line is not None and "not used" in line and f"{key} another" in line
    assert step_s == planned(capsys, "cluster.profile=off")[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one recipe, one table"),
        (["rows.csv"], "a table needs --cluster"),
        (["rows.csv", "--cluster", "h100"], "file: rows.csv"),
        (["empty.csv", "--cluster", "h100"], "column names"),
        (["mixed.csv", "--cluster", "h100"], "A100-SXM-80GB, the"),
        (["unmeasured.csv", "--cluster", "h100"], "are not compared"),
    ],
)
def test_what_it_cannot_take_is_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty.csv").touch()
    rows_file(tmp_path, "1", "120").rename("mixed.csv")
    head, line = rows_file(tmp_path, "1").read_text(encoding="utf-8").splitlines()
    blank = line.replace(",1007.0,,", ",,,").replace(",16.2701,", ",,")
    Path("unmeasured.csv").write_text(f"{head}\n{blank}\n", encoding="utf-8")
    Path("rows.csv").unlink()
    assert run(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_damaged_profile_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", str(rows_file(tmp_path, "1")), "--cluster", "h100"]) == 0
    profile_path("h100").write_text("cluster: h100\n", encoding="utf-8")
    capsys.readouterr()
    assert run([*PLAN, "--json"]) == 2
    assert codes(capsys.readouterr().out) == [("wrong_profile", "")]
