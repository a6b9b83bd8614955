"""A run whose length is given in tokens or epochs: its steps, its end, and resuming it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.problems import raises

from trainspec_cli.balance.batch.batch import run_phases, schedule_batches
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.reporter.console import RunConsole
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.session.launching.nodes import NodeOptions
from trainspec_cli.session.launching.resume import prepare_resume
from trainspec_cli.session.recipe import data as run_data
from trainspec_cli.session.recipe.load import load, load_for_planning

RAMP = "batching.schedule={kind: ramp, stages: [{from_tokens: 5120, global_batch_size: 16}]}"


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Documents that make some dozens of samples of 16 tokens."""
    file = tmp_path / "text.jsonl"
    lines = (json.dumps({"text": " ".join(f"word{number * place}" for place in range(20))}) for number in range(40))
    file.write_text("\n".join(lines))
    return str(file)


def steps_of(spec: RunSpec) -> int:
    return spec.train.max_steps


def test_tokens_are_rounded_up_to_whole_steps() -> None:
    """8 samples of 64 tokens are a step of `tiny`."""
    assert steps_of(load(["recipe=tiny", "train.tokens=51200"]).spec) == 100
    assert steps_of(load(["recipe=tiny", "train.tokens=51201"]).spec) == 101
    assert steps_of(load(["recipe=tiny", "train.tokens=512e9"]).spec) == 10**9
    assert steps_of(load(["recipe=tiny", "train.tokens=51200", "data.seq_len=32"]).spec) == 200
    assert steps_of(load_for_planning(["recipe=llama3_70b", "train.tokens=1e12"]).spec) == 119_210


@pytest.mark.parametrize(
    ("length", "share", "steps"),
    [
        ("train.max_steps=1000", "3%", 30),
        ("train.max_steps=1000", "0.03", 30),
        ("train.max_steps=1001", "2.5 %", 26),
        ("train.tokens=51200", "10%", 10),
        ("train.max_steps=1000", "30", 30),
        ("train.max_steps=1000", "0%", 0),
    ],
)
def test_a_warm_up_may_be_a_share_of_the_run(length: str, share: str, steps: int) -> None:
    spec = load(["recipe=tiny", length, f"optim.schedule.warmup_steps={share}"]).spec
    assert spec.optim.schedule.warmup_steps == steps


def test_a_share_of_a_run_of_no_length_is_not_reported_besides() -> None:
    with pytest.raises(RecipeError) as caught:
        load(["recipe=tiny", "train.max_steps=many", "optim.schedule.warmup_steps=3%"])
    assert [problem.path for problem in caught.value.problems] == ["train.max_steps"]
    with pytest.raises(RecipeError) as caught:
        load(["recipe=tiny", "optim.schedule.warmup_steps=1.5"])
    assert [(problem.code, problem.path) for problem in caught.value.problems] == [
        ("wrong_type", "optim.schedule.warmup_steps")
    ]


def test_a_warm_up_may_be_a_share_of_epochs(text: str) -> None:
    spec = load(["recipe=tiny", "data=jsonl", f"data.path={text}", "train.epochs=20", "data.seq_len=16",
                 "data.tokenizer.vocab_size=300", "optim.schedule.warmup_steps=50%"]).spec  # fmt: skip
    assert spec.optim.schedule.warmup_steps == -(-spec.train.max_steps // 2) > 0


def test_samples_of_images_are_counted_as_tokens_are() -> None:
    assert steps_of(load(["recipe=tiny_resnet", "train.tokens=1000", "batching.global_batch_size=100"]).spec) == 10


def test_a_batch_that_grows_trains_the_same_tokens_in_fewer_steps() -> None:
    spec = load(["recipe=tiny", RAMP, "train.tokens=51200"]).spec
    phases = run_phases(schedule_batches(spec))
    assert [(phase.step_samples, phase.steps) for phase in phases] == [(8, 10), (16, 45)]
    assert sum(phase.step_samples * phase.steps for phase in phases) * 64 == 51200


def test_other_values_may_refer_to_the_steps() -> None:
    spec = load(["recipe=tiny", "train.tokens=51200", "checkpoint.interval_steps=${train.max_steps}"]).spec
    assert spec.checkpoint.interval_steps == 100


def test_an_epoch_is_every_training_sample_once() -> None:
    asked = ["recipe=tiny_resnet", "data=phantom", "data.phantom.samples=100", "batching.global_batch_size=8"]
    assert steps_of(load([*asked, "train.epochs=1"]).spec) == 13
    assert steps_of(load([*asked, "train.epochs=0.5"]).spec) == 7
    assert steps_of(load([*asked, "train.epochs=4"]).spec) == 50


def test_epochs_of_text_follow_the_prepared_tokens(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["recipe=tiny", "data=jsonl", f"data.path={text}", "data.seq_len=16", "data.tokenizer.vocab_size=300"]
    once, thrice = (steps_of(load([*asked, "batching.global_batch_size=1", f"train.epochs={n}"]).spec) for n in (1, 3))
    assert once > 20 and thrice == 3 * once
    assert steps_of(load([*asked, "train.epochs=1"]).spec) == -(-once // 8)
    assert capfd.readouterr().out == "", "what --json prints stays whole"


@pytest.mark.parametrize(
    ("arguments", "code", "path", "message"),
    [
        (["train.tokens=1e6", "train.epochs=2"], "contradiction", "train.tokens", "both set"),
        (["train.tokens=51200", "train.max_steps=7"], "contradiction", "train.max_steps", r"train.tokens` \(100 steps"),
        (["train.epochs=2", "data=text", "data.path=gone"], "unknown_length", "train.epochs", "gone "),
        (["train.epochs=2", "data=mixture"], "unsupported", "train.epochs", "different lengths"),
        (["train.tokens=-5"], "out_of_range", "train.tokens", "at least 1"),
        (["train.epochs=0"], "out_of_range", "train.epochs", "more than 0"),
        (["train.tokens=many"], "wrong_type", "train.tokens", "or null"),
        (["train.tokens=5", "batching.global_batch_size=x"], "wrong_type", "batching.global_batch_size", "is 'x'"),
    ],
)
def test_a_length_that_cannot_be_is_refused(arguments: list[str], code: str, path: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as raised:
        load(["recipe=tiny", *arguments])
    assert (raised.value.problems[0].code, raised.value.problems[0].path) == (code, path)
    found = {(problem.code, problem.path) for problem in raised.value.problems}
    assert ("missing_value", "train.max_steps") not in found, "it follows from what is wrong"


def test_the_record_of_a_run_can_be_launched_again() -> None:
    """composed.yaml holds the tokens and the steps that they make."""
    loaded = load(["recipe=tiny", "train.tokens=51200"])
    written = loaded.composed.data["train"]
    assert (written["tokens"], written["max_steps"]) == (51200, 100)
    assert steps_of(load(["recipe=tiny", "train.tokens=51200", "train.max_steps=100"]).spec) == 100


def test_a_run_goes_on_to_more_tokens_or_epochs_or_steps(
    make_run: Callable[..., RunDir], console: RunConsole, tmp_path: Path
) -> None:
    run = make_run("train.tokens=51200")

    def steps(*changes: str) -> tuple[int, int | None]:
        train = prepare_resume(run, changes, NodeOptions(), console).plan.spec.train
        return train.max_steps, train.tokens

    write_json(run.manifest(10), {"about": {"step": 10, "samples": 80}})
    assert steps() == (100, 51200)
    assert steps("train.tokens=102400") == (200, 102400)
    assert steps("train.max_steps=50") == (50, None)
    with raises(RecipeError, "contradiction", "`train.tokens`", path="train.max_steps"):
        steps("train.max_steps=50", "train.tokens=102400")


def test_a_run_of_tokens_is_done_when_they_are_trained(make_run: Callable[..., RunDir], console: RunConsole) -> None:
    """Steps of a run that lost a replica group may have had fewer samples than usual."""
    run = make_run("train.tokens=5120", step=10)
    write_json(run.manifest(10), {"about": {"step": 10, "samples": 79}})
    assert prepare_resume(run, [], NodeOptions(), console).plan.total_steps == 10
    write_json(run.manifest(10), {"about": {"step": 10, "samples": 80}})
    with raises(RecipeError, "nothing_left") as raised:
        prepare_resume(run, [], NodeOptions(), console)
    assert raised.value.problems[0].hint.endswith(" train.tokens=10240")


def test_a_fraction_of_epochs_is_not_rounded_up_past_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """In floating point 1.1 times 50,000 is a little more than 55,000."""
    monkeypatch.setattr(run_data, "count_samples", lambda *_: 50_000)
    recipe = ["recipe=tiny", "batching.global_batch_size=100"]
    assert steps_of(load([*recipe, "train.epochs=1.1"]).spec) == 550
    assert steps_of(load([*recipe, "train.epochs=1.1001"]).spec) == 551
