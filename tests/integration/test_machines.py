"""Every machine of the lab with every recipe: what is detected, planned and started is one story.

The default run takes each machine and each recipe once; `pytest -m slow` takes them all, with and without replica
groups. `PYTHONPATH=tests python -m lab.gpus.table` prints the same as a table.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.gpus.machines import play, stub
from lab.gpus.table import ALIKE, ODD, UNUSABLE, Cell, call, recipes, walk, write_tokens

DONE, WRONG, DOES_NOT_FIT, LACKS = 0, 2, 3, 4
LARGE = ("deepseek_v3", "gpt_oss_120b", "llama3_405b", "mixtral_8x22b", "qwen3_235b_a22b")
"""Recipes that fit no machine of the lab; each search of their layouts takes seconds."""
FITTING = [name for name in recipes() if name not in LARGE]
SEARCHED_LONG = ("gpt_oss_20b", "llama3_70b", "mixtral_8x7b", "qwen3_14b", "qwen3_30b_a3b", "qwen3_32b")
"""Recipes whose advice takes seconds where nothing fits; the default run takes them where they fit."""
MACHINES = [*ALIKE, *ODD]
QUICK = [name for name in FITTING if name not in SEARCHED_LONG]
SMALL = [name for name in QUICK if name.startswith("tiny") or name in ("quickstart", "mamba2_130m")]
MIXED = [("8xh100_sxm", "chaos"), *(("8xb200", name) for name in SEARCHED_LONG)]
MIXED += [(MACHINES[place], name) for place, name in enumerate(QUICK)]
MIXED += [(machine, SMALL[place % len(SMALL)]) for place, machine in enumerate(MACHINES[len(QUICK) :])]
"""Each machine, and each recipe, at least once; the odd machines take the small recipes."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("machines") / "tokens")


def memory_bytes(machine: str) -> int:
    """Return the memory of the smallest device that a run on the machine could take; 0 where the node's counts."""
    gpus = stub.read_machine(machine)["gpus"]
    slices = [piece["memory_mib"] for gpu in gpus for piece in gpu.get("mig", [])]
    whole = [gpu.get("memory_mib", 0) for gpu in gpus]
    if machine == "mig_by_uuid":  # it names the second slice
        return int(slices[1]) * 2**20
    return min(slices or whole, default=0) * 2**20


def check(cell: Cell) -> None:
    """Hold what a command made of a recipe on a machine against what it has to be."""
    where = f"{cell}\n{cell.text[-2000:]}"
    assert cell.exit_code in (DONE, WRONG, DOES_NOT_FIT, LACKS), where
    if cell.exit_code == WRONG:
        assert set(cell.codes) <= {"too_few_processes", "not_divisible", "unsupported"}, where
        assert cell.elastic or cell.recipe == "chaos", where
    elif cell.exit_code == DOES_NOT_FIT:
        assert cell.command == "plan" or cell.codes == ["does_not_fit"], where
    elif cell.exit_code == LACKS:
        assert set(cell.codes) <= {"no_bf16", "too_few_gpus"}, where
    elif cell.plan is not None:
        assert cell.devices == cell.plan["devices_per_node"], where
        if cell.needed_bytes is None:
            # Either nothing can be predicted, or the time cannot before this machine is measured.
            said = call(["launch", *cell.arguments, "--dry-run"])[1]
            assert "no prediction: " in said or "cannot be predicted" in said, where
        elif cell.plan["device"] == "cuda":
            limit_bytes = memory_bytes(cell.machine)
            assert not limit_bytes or cell.needed_bytes <= limit_bytes, where
            assert cell.step_s, where


@pytest.mark.parametrize(
    ("machine", "recipe"),
    [pytest.param(*pair, marks=[pytest.mark.slow] * (place % 8 > 0)) for place, pair in enumerate(MIXED)],
)
def test_a_machine_and_a_recipe(
    machine: str, recipe: str, tokens: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    play(machine, monkeypatch)
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path))
    for cell in walk(machine, recipe, tokens):
        check(cell)


@pytest.mark.parametrize("machine", ["2xh100_sxm", "8xh100_sxm", "2xrtx_3080"])
def test_replica_groups_of_a_machine(machine: str, tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(machine, monkeypatch)
    for cell in walk(machine, "quickstart", tokens, elastic=True, only=("launch",)):
        check(cell)


@pytest.mark.parametrize("machine", UNUSABLE)
def test_gpus_that_cannot_be_used_are_refused_with_advice(
    machine: str, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs on the CPU instead, unless the user says so."""
    play(machine, monkeypatch)
    for cell in walk(machine, "quickstart", tokens, only=("plan", "launch")):
        assert cell.exit_code == LACKS, f"{cell}\n{cell.text}"
        assert cell.codes == ["no_gpu"]
        assert "cluster.device=cpu" in cell.text


def test_the_user_may_choose_the_cpu_where_gpus_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    play("lost", monkeypatch)
    code, text, shown = call(["launch", "recipe=quickstart", "cluster.device=cpu", "--dry-run", "--json"])
    assert (code, shown["plan"]["device"]) == (DONE, "cpu"), text


EXAMINED = ("busy", "lost", "mismatched_driver", "mixed", "amd_visible")


@pytest.mark.parametrize(
    "machine",
    [
        *EXAMINED,
        *(pytest.param(name, marks=pytest.mark.slow) for name in (*MACHINES, *UNUSABLE) if name not in EXAMINED),
    ],
)
def test_the_doctor_examines_a_machine(machine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play(machine, monkeypatch)
    monkeypatch.chdir(tmp_path)
    code, text, shown = call(["doctor", "--json", "cluster.devices_per_node=1"])
    assert code in (DONE, LACKS), text
    failed = {check["name"] for node in shown["hosts"] for check in node["checks"] if check["status"] == "fail"}
    assert (machine in UNUSABLE) == ("chips" in failed), text


def test_a_large_model_is_never_spread_over_small_gpus_unseen(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An 8B model in 24 GB: a GPU that the catalogue lacks is checked as one that it has."""
    for machine in ("2xrtx_3090", "2xunknown", "2xrtx_3080"):
        with monkeypatch.context() as patch:
            play(machine, patch)
            (launch,) = walk(machine, "llama3_8b", tokens, only=("launch",))
        assert launch.exit_code == DOES_NOT_FIT or launch.needed_bytes, launch.text
        check(launch)


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [False, True], ids=["plain", "elastic"])
@pytest.mark.parametrize("recipe", recipes())
def test_every_machine_with_every_recipe(
    recipe: str, elastic: bool, tokens: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Launches are tried on every machine, plans and validations on every third. A recipe that fits no machine is tried
    on three of them."""
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path))
    wrong = []
    for place, machine in enumerate(("1xt4", "8xh200", "8xb200") if recipe in LARGE else MACHINES):
        with monkeypatch.context() as patch:
            play(machine, patch)
            only = ("launch",) if elastic or place % 3 else ()
            for cell in walk(machine, recipe, tokens, elastic=elastic, only=only):
                try:
                    check(cell)
                except AssertionError:
                    wrong.append(f"{machine} {cell.command}: {cell.exit_code} {cell.codes} {cell.layout}")
    assert not wrong, "\n".join(wrong)
