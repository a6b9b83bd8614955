"""`trainspec certify`: what is asked for, before anything runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

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
        told = capsys.readouterr()
        return int(code or 0), told.out, told.err

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


def test_the_model_and_the_loss_of_a_recipe_take_the_place_of_the_families(run, families_restored):
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


def test_a_recipe_that_cannot_be_trained_is_told_before_anything_runs(run, families_restored):
    code, _, err = run("recipe=tiny", "model=own", "--list")
    assert code == 2
    assert "type model.block=FILE.py:NAME" in err


def test_a_pattern_that_names_nothing_is_told_before_anything_runs(run):
    code, _, err = run("--only", "NUM-11")
    assert code == 2
    assert "--only NUM-11 names no clause, family or case" in err
    assert "did you mean NUM-1?" in err


def test_an_output_that_cannot_be_written_is_told_before_anything_runs(run, tmp_path):
    code, _, err = run("--output", str(tmp_path / "no" / "such" / "folder.json"))
    assert code == 2
    assert "cannot be written: No such file or directory" in err


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
    file.write_text(file.read_text().replace('"kept"', '"broken"'))
    code, _, err = run("--verify", str(file))
    assert code == 2
    assert "was altered" in err


def test_a_certificate_that_was_forged_under_its_public_digest_is_refused(run, tmp_path):
    file = tmp_path / "certificate.json"
    assert run("--only", "LEGAL-1", "--output", str(file))[0] == 0
    honest = json.loads(file.read_text())
    machine = honest["machine"] | {"gpu_names": ["NVIDIA B300"] * 8}
    for change in ({"machine": machine}, {"whole": True}, {"machine": machine, "whole": True}):
        forged = honest | change
        file.write_text(json.dumps(forged | {"digest": digest(forged)}))
        code, _, err = run("--verify", str(file))
        assert code == 2 and "contradicts itself" in err


@pytest.mark.parametrize(("gpus", "processes", "certified"), [(1, (), 0), (2, (), 2), (2, ("--processes", "4"), 0)])
def test_where_gpus_are_too_few_the_cpu_is_certified_and_that_is_said(run, monkeypatch, gpus, processes, certified):
    here = Machine("host", cpu_cores=8, memory_bytes=2**34, bf16=True, gpu_names=("NVIDIA H200",) * gpus)
    monkeypatch.setattr("trainspec_cli.wings.certify.commands.certify.machine_here", lambda: here)
    code, out, err = run("--only", "LEGAL-1", "--json", *processes)
    assert code == 0
    assert len(json.loads(out)["machine"]["gpu_names"]) == certified
    assert ("the CPU is certified" in err) == (certified == 0)


def test_a_machine_without_gpus_certifies_its_cpu_with_nothing_to_explain(run, monkeypatch):
    here = Machine("host", cpu_cores=8, memory_bytes=2**34, bf16=False)
    monkeypatch.setattr("trainspec_cli.wings.certify.commands.certify.machine_here", lambda: here)
    code, out, err = run("--only", "LEGAL-1", "--json")
    assert code == 0
    assert json.loads(out)["machine"]["cpu_cores"] == 8
    assert "need a GPU each" not in err


def test_a_signed_certificate_is_refused_where_another_key_is_asked_for(run, tmp_path):
    key, file = tmp_path / "key", tmp_path / "certificate.json"
    fingerprint = make_key(key)
    code, out, _ = run("--only", "LEGAL-1", "--key", str(key), "--output", str(file))
    assert code == 0 and out.startswith(f"signed by {fingerprint}")
    assert run("--verify", str(file), "--key", f"{key}.pub")[0] == 0
    code, out, _ = run("--verify", str(file), "--key", fingerprint, "--json")
    assert code == 0 and json.loads(out)["verification"]["signed"] is True
    code, _, err = run("--verify", str(file), "--key", "SHA256:other")
    assert code == 2 and "a signature by SHA256:other is needed" in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--key", "no-such-key"), 4, "the key no-such-key cannot be read"),
        (("--verify", "c.json", "--dir", "kept"), 2, "--dir does not go with --verify"),
        (("--verify", "c.json", "--key", "none.pub"), 2, "there is no file none.pub"),
    ],
)
def test_what_does_not_go_together_is_told_before_anything_runs(run, arguments, code, words):
    found, _, err = run(*arguments)
    assert found == code
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engine", "no-such-program x"), "names no-such-program, and there is no such program"),
        (("--engine", "'"), "cannot be read: No closing quotation"),
        (("--engine", ""), "is no command"),
        (("--engine", "python x.py", "--only", "LIVE-1"), "names no clause or case that an engine is asked for"),
        (("recipe=tiny", "--engine", "python x.py"), "and a recipe was given"),
    ],
)
def test_an_engine_that_cannot_be_asked_is_told_before_anything_runs(run, families_restored, arguments, words):
    code, _, err = run(*arguments)
    assert code == 2
    assert words in err


def test_cases_of_engines_and_of_launches_are_listed_too(run, families_restored):
    assert "PERF-3  launched" in run("--list", "--only", "PERF-*")[1]
    assert "NUM-2  fp32-dp_replicate2-sgd" in run("--engine", "python x.py", "--list")[1].splitlines()


ENGINES = Path(__file__).parents[1] / "certify" / "engines"


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


def test_a_cpu_is_not_certified_in_the_place_of_gpus_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    play("mismatched_driver", monkeypatch)
    with pytest.raises(MachineError, match="NVML error 18") as raised:
        machine_here()
    assert raised.value.problems[0].hint.endswith("CUDA_VISIBLE_DEVICES= certifies the CPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine_here().gpu_names == ()
