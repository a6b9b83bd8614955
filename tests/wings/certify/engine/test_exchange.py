"""Requests to another engine, and errors for wrong answers; the engines are separate programs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lab.drawing import slow_after
from safetensors.numpy import save_file

from trainspec_cli.core.errors import WorkerError
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.wings.certify.other_engine import Engine, ProtocolRun, ask, ask_all, engine_checks

SCRIPT = str(Path(__file__).with_name("scripted_engine.py"))
SHAPES = {"a": (2, 3), "b": (4,)}
TRAINED = ProtocolRun(asks=("gradients", "losses"))
WHOLE = ProtocolRun(optimizer="adamw", asks=("losses", "weights"), saves=True)


def engine(folder: Path, manner: str, timeout_s: float = 60.0) -> Engine:
    tensors = {name: np.full(shape, 0.5, np.float32) for name, shape in SHAPES.items()}
    if manner == "wrong_shape":
        tensors["a"] = tensors["a"].T.copy()
    elif manner == "half":
        tensors["a"] = tensors["a"].astype(np.float16)
    elif manner == "no_tensor":
        del tensors["a"]
    elif manner == "nan":
        tensors["a"][0] = np.nan
    save_file(tensors, folder / f"{manner}.safetensors")
    command = (sys.executable, "-I", "-S", SCRIPT, manner, str(folder / f"{manner}.safetensors"))
    return Engine(command, folder, "cpu", SHAPES, timeout_s)


def test_a_complete_answer_is_read(tmp_path: Path) -> None:
    found = ask(engine(tmp_path, "answers"), TRAINED)
    assert found.losses == [5.0 + step for step in range(20)]
    assert {name: values.shape for name, values in found.gradients.items()} == SHAPES
    assert found.gradients["a"].dtype == np.float32 and found.gradients["b"].tolist() == [0.5] * 4
    assert not found.declined


def test_the_fields_of_a_request(tmp_path: Path) -> None:
    run = replace(WHOLE, layout=Layout(dp_replicate=2), saves=False, resumes=WHOLE)
    ask_all(engine(tmp_path, "answers"), [WHOLE, run], lambda done: None)
    asked = json.loads((tmp_path / run.name / "request.json").read_text())
    assert (asked["processes"], asked["layout"]["dp_replicate"]) == (2, 2)
    assert (asked["first_step"], asked["steps"], asked["asks"]) == (10, 20, ["losses", "weights"])
    assert asked["resume_from"] == str(tmp_path / WHOLE.name / "checkpoint") and asked["save_after"] is None
    assert asked["optimizer"]["name"] == "adamw" and asked["clip_from"] is None
    first = json.loads((tmp_path / WHOLE.name / "request.json").read_text())
    assert (first["save_after"], first["save_to"]) == (10, asked["resume_from"])
    plain = ask(engine(tmp_path, "answers"), TRAINED).folder / "request.json"
    assert json.loads(plain.read_text())["clip_from"] == 10


@pytest.mark.parametrize(
    ("manner", "words"),
    slow_after(
        4,
        [
            ("fails", "exit code 1\n\nno such layout"),
            ("few_losses", "`losses` has 19 numbers; 20"),
            ("elsewhere", "`gradients` is '../gradients.safetensors'"),
            ("wrong_shape", r"gradients.safetensors \(`gradients`\): a is F32 of \[3, 2\]; F32 of \[2, 3\]"),
            ("silent", "answer.json"),
            ("garbage", "answer.json"),
            ("old", "`schema` is 'trainspec.engine/0'"),
            ("nan_loss", r"`losses\[3\]` is nan"),
            ("text_losses", "answer.json: .*losses"),
            ("no_file", "`gradients` names none.safetensors"),
            ("half", r"a is F16 of \[2, 3\]; F32 of \[2, 3\]"),
            ("no_tensor", r"\(`gradients`\) has no tensor a"),
            ("nan", r"\(`gradients`\): a has values"),
            ("cut", r"`gradients`: .*gradients.safetensors"),
        ],
    ),
)
def test_a_wrong_answer_names_the_file_and_the_field(tmp_path: Path, manner: str, words: str) -> None:
    with pytest.raises(WorkerError, match=words) as error:
        ask(engine(tmp_path, manner), TRAINED)
    (problem,) = error.value.problems
    assert problem.code == "bad_answer"
    assert "request.json" in problem.hint


def test_a_slow_engine_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="within 1 s"):
        ask(engine(tmp_path, "asleep", timeout_s=1.0), TRAINED)


def test_only_answers_that_were_wrong_are_requested_again(tmp_path: Path) -> None:
    with pytest.raises(WorkerError):
        ask(engine(tmp_path, "nan"), TRAINED)
    ask(engine(tmp_path, "answers"), TRAINED)
    assert ask(engine(tmp_path, "fails"), TRAINED).losses[0] == 5.0


def test_a_run_that_continues_a_declined_one_is_declined(tmp_path: Path) -> None:
    two = replace(WHOLE, layout=Layout(dp_replicate=2))
    follows = replace(WHOLE, saves=False, resumes=two)
    answers = ask_all(engine(tmp_path, "alone"), [two, follows], lambda done: None)
    assert "one process" in answers[two].declined
    assert answers[follows].declined.endswith(f": {answers[two].declined}")


def test_runs_follow_those_whose_checkpoints_they_need_and_have_unique_names() -> None:
    runs = list(dict.fromkeys(run for check in engine_checks(2) for run in check.runs))
    assert len({run.name for run in runs}) == len(runs)
    for position, run in enumerate(runs):
        assert run.resumes is None or run.resumes in runs[:position]
        assert run.resumes is None or run.resumes.saves
    assert {run.layout.world_size for check in engine_checks(1) for run in check.runs} == {1}
