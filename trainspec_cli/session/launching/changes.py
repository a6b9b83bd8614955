"""Changes to a resumed run: the values that may change, the data, and a description of the changes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from trainspec_cli.balance.batch.batch import schedule_batches, step_batch
from trainspec_cli.core.errors import Problem, TrainspecError
from trainspec_cli.core.json_value import JsonObject, JsonValue, flatten
from trainspec_cli.core.reading.files import read_field, read_object
from trainspec_cli.data.corpus.shards import TOKENIZER_FILE
from trainspec_cli.data.corpus.sources import Collection, check_tokenizers
from trainspec_cli.planner.fewer import specs_on_fewer
from trainspec_cli.planner.plan import plan
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.check import check, check_engine
from trainspec_cli.recipe.rules.run import describe_other_blocks
from trainspec_cli.reporter.console import PrintableConsole, RunConsole
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_data_dir
from trainspec_cli.session.planning.predict import predict
from trainspec_cli.session.recipe.data import prepare_data
from trainspec_cli.session.recipe.load import Loaded

OTHER_MODEL = "start a new run: trainspec launch recipe={recipe} {change}"
SAME_WEIGHTS = "start a new run from this one's weights: trainspec launch recipe={recipe} init.from={run} {change}"
MERGED = (
    "merge its adapters, and start a new run from the result: trainspec export {run} --output MERGED, and then "
    "trainspec launch recipe={recipe} init.from=hf:MERGED {change}"
)
FIXED = {
    "model": ("the checkpoint holds the weights of this model", OTHER_MODEL),
    "data.tokenizer": ("the model was trained with this tokenizer", OTHER_MODEL),
    "lora": ("the checkpoint holds adapters of this shape and scale", MERGED),
    "optim.name": ("the checkpoint holds the state of this optimizer", SAME_WEIGHTS),
    "optim.groups": ("the checkpoint holds the state of the parameters that these groups train", SAME_WEIGHTS),
    "init": ("the run has started, and its weights come from its checkpoint", OTHER_MODEL),
    "data.seq_len": ("the position in the data is counted in samples of this length", SAME_WEIGHTS),
    "batching.global_batch_size": ("the position in the data is counted in steps of this size", SAME_WEIGHTS),
    "train.seed": ("it determines the sample order, and the run has already trained on some samples", SAME_WEIGHTS),
    "run.dir": ("the run continues in its own folder", "move the folder and resume it there"),
}
"""Keys that a resume cannot change, each with the reason and what to do instead."""
MORE_STEPS = re.compile(r"train\.max_steps=\+(\d[\d_]*)")


def count_more_steps(old: RunSpec, changes: Sequence[str]) -> list[str]:
    """Replace `train.max_steps=+1000` with the run's current number of steps plus 1000."""
    return [
        f"train.max_steps={old.train.max_steps + int(more[1])}" if (more := MORE_STEPS.fullmatch(change)) else change
        for change in changes
    ]


def find_fixed(run: RunDir, recipe: str, old: JsonObject, new: JsonObject) -> Iterator[Problem]:
    """Yield a problem for every value listed in `FIXED` that was changed."""
    from trainspec_cli.recipe.compose.values import (
        render_value,  # deferred: loads hydra, which --help does not need
    )

    for path, (before, after) in differences(old, new).items():
        for key, (reason, instead) in FIXED.items():
            if path != key and not path.startswith(f"{key}."):
                continue
            message = f"`{path}` cannot change when a run is resumed (it is {render_value(before)}): {reason}"
            change = shlex.quote(f"{path}={render_value(after)}")
            hint = instead.format(recipe=shlex.quote(recipe), run=shlex.quote(str(run.root)), change=change)
            yield Problem("fixed_value", message, path, f"leave it out, or {hint}")


def differences(old: JsonObject, new: JsonObject) -> dict[str, tuple[JsonValue, JsonValue]]:
    """Return path -> (value before, value now) for each value that differs. An absent value is None."""
    before = flatten(old)
    after = flatten(new)
    paths = dict.fromkeys([*after, *before])
    return {
        path: (before.get(path), after.get(path))
        for path in paths
        if path not in after or after[path] != before.get(path)
    }


def prepare_changed_data(run: RunDir, loaded: Loaded, console: PrintableConsole) -> tuple[Loaded, Path | None]:
    """Prepare the data of a changed run with its model's tokenizer. Return the spec that reads the data, and the data
    folder. Raises RecipeError if the data was prepared with another tokenizer, and the same errors as
    `prepare_data`."""
    data = loaded.spec.data
    old_folder = read_data_dir(run)
    if data.unit == "samples" or old_folder is None:
        return loaded, prepare_data(loaded, console)
    old = Collection.open(old_folder)
    if old.tokenizer_folder is not None:
        tokenizer = replace(data.tokenizer, path=str(old.tokenizer_folder / TOKENIZER_FILE))
        loaded = replace(loaded, spec=replace(loaded.spec, data=replace(data, tokenizer=tokenizer)))
    folder = prepare_data(loaded, console)
    assert folder is not None, "tokens are stored in a folder"
    check_tokenizers([old.main.path, Collection.open(folder).main.path])
    return loaded, folder


def describe_changes(before: RunSpec, now: RunSpec, step: int, samples: int) -> Iterator[str]:
    """Yield a line for each value that has changed since the last start, and for the effects on the learning rate and
    the data at `step`, after `samples` samples."""
    from trainspec_cli.recipe.compose.values import (
        render_value,  # deferred: loads hydra, which --help does not need
    )

    for path, (old, new) in differences(to_plain(before), to_plain(now)).items():
        yield f"{path} is {render_value(new)}, and was {render_value(old)}"
    if not step:
        return
    rate = _learning_rate(now, samples)
    old_rate = _learning_rate(before, samples)
    if rate != old_rate:
        yield f"the learning rate of the next step is {rate:.3g}, and would have been {old_rate:.3g}"
    if before.data != now.data:
        yield f"the data continues with sample {samples:,} in its new order"


def _learning_rate(spec: RunSpec, samples: int) -> float:
    """Return the learning rate of the step after `samples`, or of the last step if the run has finished."""
    schedule = schedule_batches(spec)
    last = schedule.run_samples - spec.batching.global_batch_size
    return step_batch(schedule, min(samples, last)).lr


def trained_samples(run: RunDir, spec: RunSpec, step: int) -> int:
    """Return the number of samples that the run had trained on at its checkpoint of `step`; 0 if there is no
    checkpoint. Raises UnreadableFileError."""
    if not spec.ends_by_samples or not step:
        return step * spec.batching.global_batch_size
    manifest = run.manifest(step)
    return read_field(manifest, read_field(manifest, read_object(manifest), "about", dict), "samples", int)


# The plan of a run that continues on fewer nodes than it started with.


def plan_on_fewer(before: Plan, nodes: int, *, machine: Machine) -> Plan | None:
    """Return the plan of the same run on `nodes` nodes; None if its recipe does not allow that, or if no layout fits.
    The layouts are tried in the order of `specs_on_fewer`. The kernels do not change."""
    quiet = RunConsole(quiet=True)  # the prediction is hypothetical, so it is not shown
    for spec, must_be_predicted in specs_on_fewer(before.spec, before.layout, nodes):
        # The data was read when the run first started, so its source may no longer exist.
        if any(not problem.path.startswith("data.") for problem in [*check(spec), *check_engine(spec)]):
            continue
        try:
            found = predict(plan(spec, machine), machine, quiet, force=False)
        except TrainspecError:
            continue
        if describe_other_blocks(spec, before.layout.tp, found.layout.tp):
            continue
        if found.prediction is not None or not must_be_predicted:
            return replace(found, kernels=before.kernels)
    return None
