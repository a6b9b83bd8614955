"""`trainspec certify`: its options are checked before anything runs, and certificates are verified."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from lab import own_model
from lab.gpus.machines import play
from lab.keys import make_key

from trainspec_cli.__main__ import main
from trainspec_cli.core.errors import MachineError
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.wings.certify import families
from trainspec_cli.wings.certify.cases import Case, build_spec
from trainspec_cli.wings.certify.certificate import digest
from trainspec_cli.wings.certify.commands.certify import machine_here


@pytest.fixture
def run(capsys, monkeypatch):
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["trainspec", "certify", *arguments])
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
        printed = capsys.readouterr()
        return int(code or 0), printed.out, printed.err

    return call


@pytest.fixture
def refusal(run):
    """Run with `--json` and return the exit code and the code and path of the only problem."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code, out, _ = run(*arguments, "--json")
        (problem,) = json.loads(out)["errors"]
        return code, problem["code"], problem["path"]

    return call


@pytest.fixture
def families_restored():
    kept = dict(families.FAMILIES)
    yield
    families.FAMILIES.clear()
    families.LOSSES.clear()
    families.FAMILIES.update(kept)


def test_cases_can_be_listed(run):
    code, out, _ = run("--list", "--only", "dense", "--processes", "2")
    lines = out.splitlines()
    assert code == 0
    assert "NUM-1  dense-fp32-tp2" in lines
    assert not any("moe" in line or "tp2.pp2" in line for line in lines)


def test_the_model_and_the_loss_of_a_recipe_replace_the_families(run, families_restored):
    mine = ("recipe=tiny", "model=own", f"model.block={own_model.__file__}:Averager", "model.block_params=100")
    mine += (f"train.loss={own_model.__file__}:smoothed", "train.loss_options.smoothing=0.3")
    code, out, _ = run(*mine, "--list", "--processes", "2")
    lines = out.splitlines()
    assert code == 0
    cases = [line for line in lines if not line.startswith(("PERF", "SEC"))]
    assert {line.split()[1].split("-")[0] for line in cases} == {"own"}
    assert "NUM-1  own-fp32-pp2.zbv" in lines
    assert "LIVE-3  own-fp32-dp_shard2-live-killed" in lines
    assert not any("tp2" in line or "cp2" in line for line in lines)
    spec = build_spec(Case("own"))
    assert spec.model.block_params == 100
    assert spec.train.loss_options == {"smoothing": 0.3}


def test_a_recipe_that_cannot_be_trained_is_refused_before_anything_runs(run, families_restored):
    code, _, err = run("recipe=tiny", "model=own", "--list")
    assert code == 2
    assert "model.block=FILE.py:NAME" in err


def test_a_pattern_without_a_match_is_refused_with_the_nearest_name(run):
    code, out, _ = run("--only", "NUM-11", "--json")
    (problem,) = json.loads(out)["errors"]
    assert (code, problem["code"]) == (2, "unknown_value")
    assert "NUM-1?" in problem["hint"]


def test_legal_layouts_need_no_runs_and_certificates_are_verified(run, tmp_path):
    file = tmp_path / "certificate.json"
    code, out, _ = run("--only", "LEGAL-1", "--json", "--output", str(file))
    body = json.loads(out)
    assert code == 0
    assert body["verdict"] == "kept"
    assert not body["whole"]
    code, out, _ = run("--verify", str(file))
    assert code == 0 and out.splitlines()[0].startswith("unsigned")
    code, out, _ = run("--verify", str(file), "--json")
    assert code == 0 and json.loads(out)["verification"]["signed"] is False


def test_a_certificate_forged_under_a_valid_digest_is_refused(run, refusal, tmp_path):
    file = tmp_path / "certificate.json"
    assert run("--only", "LEGAL-1", "--output", str(file))[0] == 0
    honest = json.loads(file.read_text())
    for change in (
        {"machine": honest["machine"] | {"gpu_names": ["NVIDIA B300"] * 8}},
        {"whole": True},
        {"verdict": "broken"},
    ):
        forged = honest | change
        file.write_text(json.dumps(forged))
        assert refusal("--verify", str(file))[:2] == (2, "bad_certificate")
        file.write_text(json.dumps(forged | {"digest": digest(forged)}))
        assert refusal("--verify", str(file))[:2] == (2, "bad_certificate")


@pytest.mark.parametrize(
    ("gpus", "processes", "certified"), [(0, (), 0), (1, (), 0), (2, (), 2), (2, ("--processes", "4"), 0)]
)
def test_the_cpu_is_certified_with_a_message_if_gpus_are_too_few(run, monkeypatch, gpus, processes, certified):
    here = Machine("host", cpu_cores=8, memory_bytes=2**34, bf16=True, gpu_names=("NVIDIA H200",) * gpus)
    monkeypatch.setattr("trainspec_cli.wings.certify.commands.certify.machine_here", lambda: here)
    code, out, err = run("--only", "LEGAL-1", "--json", *processes)
    assert code == 0
    assert len(json.loads(out)["machine"]["gpu_names"]) == certified
    assert bool(err) == (gpus > 0 and certified == 0)


def test_a_signed_certificate_is_refused_if_another_key_is_required(run, refusal, tmp_path):
    key, file = tmp_path / "key", tmp_path / "certificate.json"
    fingerprint = make_key(key)
    code, out, _ = run("--only", "LEGAL-1", "--key", str(key), "--output", str(file))
    assert code == 0 and out.startswith(f"signed by {fingerprint}")
    assert run("--verify", str(file), "--key", f"{key}.pub")[0] == 0
    code, out, _ = run("--verify", str(file), "--key", fingerprint, "--json")
    assert code == 0 and json.loads(out)["verification"]["signed"] is True
    assert refusal("--verify", str(file), "--key", "SHA256:other")[:2] == (2, "bad_certificate")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--key", "no-such-key"), (4, "secret", "--key")),
        (("--verify", "c.json", "--dir", "kept"), (2, "usage", "--dir")),
        (("--verify", "c.json", "--key", "none.pub"), (2, "bad_key", "--key")),
        (("--output", "no/such/folder.json"), (2, "output_exists", "")),
        (("--engine", "no-such-program x"), (2, "usage", "--engine")),
        (("--engine", "'"), (2, "usage", "--engine")),
        (("--engine", ""), (2, "usage", "--engine")),
        (("--engine", "python x.py", "--only", "LIVE-1"), (2, "unknown_value", "--only")),
        (("recipe=tiny", "--engine", "python x.py"), (2, "usage", "--engine")),
        (("--engine", "python x.py", "--device", "emulated"), (2, "usage", "--device")),
        (("--verify", "c.json", "--device", "emulated"), (2, "usage", "--device")),
        (("--device", "emulatd"), (2, "unknown_value", "--device")),
    ],
)
def test_options_are_checked_before_anything_runs(refusal, families_restored, arguments, expected):
    assert refusal(*arguments) == expected


def test_cases_of_engines_and_of_launches_are_listed_too(run, families_restored):
    assert "PERF-3  launched" in run("--list", "--only", "PERF-*")[1]
    assert "NUM-2  fp32-dp_replicate2-sgd" in run("--engine", "python x.py", "--list")[1].splitlines()


def test_an_emulated_device_compiles_nothing_and_launches_nothing(run: Any) -> None:
    lines = run("--list", "--device", "emulated", "--processes", "2")[1].splitlines()
    assert "NUM-1  dense-fp32-tp2" in lines
    assert not any("compile" in line or line.endswith("launched") or line.startswith("KERN") for line in lines)


@pytest.mark.slow
def test_gradients_on_an_emulated_device_do_not_depend_on_the_layout(run: Any, tmp_path: Path) -> None:
    """ZeRO-3 and ring attention take paths of the engine that no CPU run takes."""
    cases = ("dense-fp32-dp_shard2", "dense-fp32-cp2.ring", "dense-fp32-pp2.zbv", "moe-fp32-dp_shard2.ep2")
    only = [word for case in cases for word in ("--only", case)]
    code, out, _ = run("--device", "emulated", *only, "--dir", str(tmp_path / "runs"), "--json")
    found = json.loads(out)
    assert code == 0 and found["features"] == ["emulated"] and found["whole"] is False
    assert len(found["findings"]) >= 2 * len(cases) and all(finding["passed"] for finding in found["findings"])


ENGINES = Path(__file__).parents[1] / "wings" / "certify" / "engines"


@pytest.mark.slow
def test_a_plain_loop_is_certified(run, families_restored, tmp_path):
    engine, file = f"{sys.executable} {ENGINES / 'plain_loop.py'}", tmp_path / "c.json"
    wanted = ("--only", "fp32-one-sgd", "--only", "NUM-4", "--only", "fp32-dp_replicate2-sgd")
    code, out, err = run("--engine", engine, *wanted, "--output", str(file), "--dir", str(tmp_path / "kept"))
    assert code == 0, err
    body = json.loads(file.read_text())
    assert {(one["clause"], one["passed"]) for one in body["findings"]} == {("NUM-1", True), ("NUM-2", True)}
    assert [one["clause"] for one in body["not_offered"]] == ["NUM-4"]
    assert not body["whole"] and "not offered" in out


def test_the_cpu_is_not_certified_instead_of_unusable_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    play("mismatched_driver", monkeypatch)
    with pytest.raises(MachineError, match="NVML error 18") as raised:
        machine_here()
    assert "CUDA_VISIBLE_DEVICES=" in raised.value.problems[0].hint
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine_here().gpu_names == ()
