"""Rules for the run: its files and evaluations, the optimizer, the batch, user-defined code, text, and Slurm."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, get_args

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.printable import is_printable, on_one_line
from trainspec_cli.core.reading.files import how_to_copy
from trainspec_cli.recipe.field_types import AUTO, Range, ranges_of
from trainspec_cli.recipe.keys.kernels import TORCH
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import (
    DecoderModel,
    HybridModel,
    ModelSpec,
    OwnModel,
    TextModel,
    TransformersModel,
    embeds_at_both_ends,
    has_layer_list,
)
from trainspec_cli.recipe.keys.run import SOURCES, DataSpec, Documents, PartSpec, RunSpec
from trainspec_cli.recipe.keys.training import (
    BLOCK,
    EXPERT_TARGETS,
    ON_DEVICE,
    OPTIMIZERS,
    QUANTISED_ROW,
    QUANTISED_SIZE,
    TARGETS,
    RampStage,
)
from trainspec_cli.recipe.parameter_names import block_names, group_of, is_frozen, parameter_names
from trainspec_cli.recipe.records import UNKNOWN
from trainspec_cli.recipe.rules.layout import pipeline_of, size_of
from trainspec_cli.recipe.user_code import BLOCK as OWN_BLOCK
from trainspec_cli.recipe.user_code import (
    CALLBACK,
    LOSS,
    OPTIMIZER,
    SOURCE,
    TOKENIZER,
    TRACKER,
    Extension,
    problems_of,
    worker_code_of,
)

RUN_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


def memory_copies(spec: RunSpec) -> Iterator[Problem]:
    path = "checkpoint.memory_interval_steps"
    if spec.checkpoint.memory_interval_steps is not None and spec.resilience.mode == "elastic":
        message = f"`{path}` is set, but with resilience=elastic every replica group already holds the newest state"
        yield Problem(code="unsupported", path=path, message=message, hint=f"set {path}=null, or resilience=restart")


def run_name(spec: RunSpec) -> Iterator[Problem]:
    """Require a run name that cannot be mistaken for a folder, an option or `last`."""
    name = spec.run.name
    if name and (not RUN_NAME.fullmatch(name) or name == "last"):
        message = f"`run.name` is {name!r}; letters, digits, `_`, `-` and `.` are allowed; `last` is the newest run"
        yield Problem("bad_name", message, "run.name", "such as run.name=baseline-2")


def local_folder(spec: RunSpec) -> Iterator[Problem]:
    """Require a run folder on this machine, or on a file system mounted by it."""
    if spec.run.dir and how_to_copy(spec.run.dir):
        message = f"`run.dir` is {spec.run.dir}; a run writes to a local or mounted folder, not to a remote path"
        yield Problem("unsupported", message, "run.dir", "set run.dir=FOLDER, and copy it after the run")


def heldout(spec: RunSpec) -> Iterator[Problem]:
    """Require evaluations for settings that depend on the held-out loss, which is lost in a healed replica group."""
    wanted = {
        "checkpoint.keep_best": spec.checkpoint.keep_best,
        "train.early_stop_evals": spec.train.early_stop_evals is not None,
    }
    for path in (path for path, is_wanted in wanted.items() if is_wanted):
        if spec.train.eval_interval_steps is None:
            message = f"`{path}` needs the held-out loss, but `train.eval_interval_steps` is null"
            yield Problem("missing_value", message, path, "set train.eval_interval_steps=100, or another number")
        if spec.resilience.mode == "elastic":
            message = f"`{path}` is set, but with resilience=elastic a restarted group forgets earlier evaluations"
            yield Problem("unsupported", message, path, "leave it out, or set resilience=restart")


def framework_has(spec: RunSpec) -> Iterator[Problem]:
    """Reject values of the layout that the framework does not support."""
    facts = spec.framework
    layout = spec.layout
    # For a single rank, or for an axis that is still `auto`, a ZeRO stage or a schedule has no effect yet.
    pinned = {
        "zero_stage": (layout.zero_stage, facts.zero_stages, layout.dp_shard not in (AUTO, 1)),
        "pipeline_schedule": (layout.pipeline_schedule, facts.schedules, layout.pp not in (AUTO, 1)),
    }
    for key, (value, has, counts) in pinned.items():
        if counts and value != AUTO and value not in has:
            path = f"layout.{key}"
            message = f"`{path}` is {value}, which {facts.name} does not have"
            hint = f"set {path}=" + ", or ".join(map(str, has)) if has else "no pipelines: set layout.pp=1"
            yield Problem("unsupported", message, path, hint)


RUN_RULES = (memory_copies, heldout, run_name, local_folder, framework_has)


# Rules for optimizers: what they cannot train, and what they cannot be combined with.


NAME = "optim.name"


def muon_models(spec: RunSpec) -> Iterator[Problem]:
    """Require complete matrices of hidden layers for Muon."""
    if spec.optim.name != "muon":
        return
    why = spec.model.record.refuses.get("muon", "")
    hint = f"set {NAME}=adamw or {NAME}=sgd"
    if spec.model.unit == "samples":
        why = f"it trains matrices: `model.family` {spec.model.family} has convolutions"
    elif not why and not has_layer_list(spec.model):
        why = f"the planner does not know the matrices of `model.family` {spec.model.family}"
    elif not why and spec.lora.rank:
        why = f"it trains complete matrices: `lora.rank` is {spec.lora.rank}"
        hint = f"set {NAME}=adamw, or lora.rank=0"
    if why:
        yield Problem("unsupported", f"`{NAME}` is muon, but {why}", NAME, hint)


def offloaded_state(spec: RunSpec) -> Iterator[Problem]:
    if spec.optim.name in ON_DEVICE and spec.offload not in ("none", AUTO):
        message = f"`offload` is {spec.offload}, but `{NAME}` {spec.optim.name} updates on the device"
        yield Problem("unsupported", message, "offload", f"set offload=none, or {NAME}=adamw")


def blocks_of_changed_layouts(spec: RunSpec) -> Iterator[Problem]:
    """Require the same quantisation blocks in every layout of the run, because the state is moved in these blocks."""
    if spec.optim.name != "adamw8bit" or not has_layer_list(spec.model):
        return
    tp = size_of(spec.layout, "tp")
    for place, change in enumerate(spec.scheduler.changes):
        if other := describe_other_blocks(spec, tp, size_of(change.of(spec.layout), "tp")):
            path = f"scheduler.changes.{place}.tp"
            yield Problem("unsupported", other, path, f"type ~{path}, or {NAME}=adamw")


def describe_other_blocks(spec: RunSpec, tp: int, other_tp: int) -> str:
    """Return why 8-bit state created with `tp` cannot be read with `other_tp`; "" if it can.

    tp divides the rows of some matrices, and each rank quantises its part in separate blocks. They are the same with
    another tp only if every part consists of complete blocks in both cases."""
    if spec.optim.name != "adamw8bit" or not has_layer_list(spec.model) or tp == other_tp:
        return ""
    for key, row in _rows_cut_by_tp(spec.model, spec.lora.rank).items():
        if any(size > 1 and row % (size * BLOCK) for size in (tp, other_tp)):
            cut = f"layout.tp {tp} and {other_tp} divide rows of {key} ({row}) into different blocks of {BLOCK}"
            return f"`{NAME}` is adamw8bit, but {cut}"
    return ""


def _rows_cut_by_tp(model: TextModel, lora_rank: int) -> dict[str, int]:
    """Return the row lengths, by the keys that determine them, for rows that are split by tp and have 8-bit moments."""
    # tp divides the rows of matrices that project back to the hidden size; it splits other matrices between rows.
    mixers = {mixer for layer in model.layer_list for mixer in layer.mixers}
    decoder = model.as_decoder
    experts = model.experts
    rows = {}
    if "attention" in mixers:
        rows["model.num_heads x head_dim"] = model.num_heads * model.head_dim
    if "latent" in mixers and decoder.mla:
        rows["model.num_heads x mla.v_head_dim"] = model.num_heads * decoder.mla.v_head_dim
    if "feed_forward" in mixers:
        rows["model.ffn_size"] = model.ffn_size
    if "experts" in mixers and experts and experts.shared_experts:
        width = experts.shared_expert_ffn_size or experts.expert_ffn_size
        rows["model.experts.shared_experts x their width"] = experts.shared_experts * width
    if isinstance(model, HybridModel) and "mamba" in mixers:
        rows["model.mamba_num_heads x mamba_head_dim"] = model.mamba_heads * model.mamba_head_dim
    others = lora_rank or model.hidden_size
    return {key: row for key, row in rows.items() if row >= QUANTISED_ROW and row * others >= QUANTISED_SIZE}


GROUPS = "optim.groups"


def parameter_groups(spec: RunSpec) -> Iterator[Problem]:
    """Require patterns that match, and parameters that can be frozen."""
    groups = spec.optim.groups
    if not groups:
        return
    model = spec.model
    if not isinstance(model, DecoderModel | HybridModel):
        message = f"`{GROUPS}` needs the names of parameters, which are only known for decoders and hybrids"
        yield Problem("unsupported", message, GROUPS, f"remove {GROUPS}")
        return
    if spec.lora.rank:
        message = f"`{GROUPS}` and `lora.rank` both choose what is trained; `lora.targets` chooses the adapters"
        yield Problem("contradiction", message, GROUPS, f"remove {GROUPS}, or set lora.rank=0")
        return
    names = parameter_names(model)
    for number, group in enumerate(groups):
        matched = [name for name in names if fnmatchcase(name, group.match)]
        path = f"{GROUPS}.{number}.match"
        if not matched:
            near = get_close_matches(group.match, names, n=3, cutoff=0.0)
            message = f"`{group.match}` matches none of the {len(names)} parameters; the nearest: {', '.join(near)}"
            yield Problem("wrong_choice", message, path, f"for example, set {path}={near[0]}")
        elif all(group_of(name, groups) is not group for name in matched):
            first = next(other.match for other in groups if group_of(matched[0], groups) is other)
            message = f"earlier groups, such as `{first}`, match all parameters of `{group.match}`"
            yield Problem("contradiction", message, path, "put the narrower pattern first")
        if group.frozen and (group.decay is not None or group.lr_scale != 1):
            message = f"the parameters of `{group.match}` are frozen, so they have no learning rate or weight decay"
            yield Problem("contradiction", message, path, "remove decay and lr_scale, or frozen")
    if not any(group.frozen for group in groups):
        return
    if all(is_frozen(name, groups) for name in names):
        message = f"`{GROUPS}` freezes all parameters, so nothing is trained"
        yield Problem("contradiction", message, GROUPS, "leave some parameters out")
    if pipeline_of(spec.layout).splits_backward:
        message = f"{spec.layout.pipeline_schedule} defers the gradients of all weights, so none can be frozen"
        yield Problem("unsupported", message, "layout.pipeline_schedule", "set layout.pipeline_schedule=1f1b")
    if spec.precision.matmul == "fp8":
        message = "fp8 layers compute the gradients of their weights, so these cannot be frozen"
        yield Problem("unsupported", message, "precision.matmul", "set precision.matmul=compute")


def trained_parts(spec: RunSpec) -> Iterator[Problem]:
    """Require that adapters have matrices to adapt, and that each pipeline stage can train something."""
    model, lora, groups = spec.model, spec.lora, spec.optim.groups
    if not lora.rank and not any(group.frozen for group in groups):
        return
    if lora.rank:
        known: tuple[str, ...] = (*TARGETS, *EXPERT_TARGETS)
        hint = "set lora.targets=[q,v]"
        if isinstance(model, TransformersModel):
            known = tuple(dict.fromkeys(name for part in model.blocks for name, _, _ in part.linear_sizes))
            hint = f"set lora.targets=[{','.join(known)}], or some of these" if known else "set lora.rank=0"
            if lora.targets == TARGETS and known:  # the default: all linear layers
                return
        if not lora.targets or not set(lora.targets) <= set(known):
            allowed = ", ".join(known) or "none, because the blocks have no linear layers"
            message = f"`lora.targets` is {list(lora.targets)}; allowed are {allowed}"
            yield Problem("wrong_choice", message, "lora.targets", hint)
            return
    if not isinstance(model, DecoderModel | HybridModel) or (lora.rank and "lora" in model.record.refuses):
        return
    ends = tuple(f".{target}" if target in EXPERT_TARGETS else f".{target}.weight" for target in lora.targets)
    trained = [
        any(name.endswith(ends) for name in block_names(model, layer))
        if lora.rank
        else any(not is_frozen(f"blocks.{number}.{name}", groups) for name in block_names(model, layer))
        for number, layer in enumerate(model.layer_list)
    ]
    path = "lora.targets" if lora.rank else GROUPS
    if lora.rank and not any(trained):
        message = f"the model has no matrix that is named in `lora.targets` ({', '.join(lora.targets)})"
        yield Problem("wrong_choice", message, path, "set lora.targets=[q,v]")
    elif not all(trained) and spec.layout.pp != 1:
        layers = [str(number) for number, is_trained in enumerate(trained) if not is_trained]
        message = (
            f"nothing is trained in layer{'s' * (len(layers) > 1)} {', '.join(layers[:8])}"
            f"{', ...' if len(layers) > 8 else ''} (`{path}`), but each pipeline stage must train something"
        )
        yield Problem("illegal_layout", message, path, "set layout.pp=1, or leave a part of each layer trained")


OPTIM_RULES = (parameter_groups, trained_parts, muon_models, offloaded_state, blocks_of_changed_layouts)


# Rules for user-defined code: it must exist, accept the engine's call, and the recipe must specify what it needs. None
# of it is executed: `user_code.find` reads the source.


BLOCK_PARAMS = "model.block_params"


def optimizer(spec: RunSpec) -> Iterator[Problem]:
    if not spec.optim.is_own:
        given = {"optim.options": bool(spec.optim.options), "optim.state_bytes": spec.optim.state_bytes is not None}
        for path, is_given in given.items():
            if is_given:
                message = f"`{path}` is for a user-defined optimizer, but `optim.name` is {spec.optim.name}"
                yield Problem("unsupported", message, path, "leave it out, or set optim.name=FILE.py:NAME")
        return
    problems = list(problems_of(Extension(OPTIMIZER, NAME, spec.optim.name, tuple(spec.optim.options)), OPTIMIZERS))
    yield from problems
    if problems:
        return
    path = "optim.state_bytes"
    if spec.optim.state_bytes is None:
        message = f"`{path}` has no value: the plan cannot know how much state {spec.optim.name} keeps per parameter"
        yield Problem("missing_value", message, path, f"set {path}=8 for two moments in fp32, 4 for one, 0 for none")
    schedule = spec.batching.schedule
    if schedule.kind != "constant" and schedule.lr_rule == "optimizer":
        path = "batching.schedule.lr_rule"
        message = f"`{path}` is optimizer, but {spec.optim.name} has no rule for a changing batch"
        yield Problem("missing_value", message, path, f"set {path}=sqrt, linear or none")


def block(spec: RunSpec) -> Iterator[Problem]:
    """Require the block of a model with user-defined blocks, and its number of parameters."""
    model = spec.model
    if not isinstance(model, OwnModel):
        return
    if not model.block:
        message = "`model.block` has no value: a model of the family own consists of user-defined blocks"
        yield Problem("missing_value", message, "model.block", "set model.block=FILE.py:NAME (docs/extending.md)")
        return
    (extension,) = OWN_BLOCK.named(model.block, model.options)
    problems = list(problems_of(extension))
    yield from problems
    if model.block_params is None and not problems:
        path = BLOCK_PARAMS
        message = f"`{path}` has no value: the plan cannot know how many parameters {model.block} creates"
        yield Problem(
            "missing_value", message, path, f"set {path}=NUMBER (most trainspec commands determine it for you)"
        )


def loss(spec: RunSpec) -> Iterator[Problem]:
    for extension in LOSS.named(spec.train.loss, spec.train.loss_options):
        yield from problems_of(extension)
    backend = spec.kernels.linear_cross_entropy
    if spec.train.loss and spec.model.unit == "samples":
        message = f"`train.loss` is for text models, but `model.family` is {spec.model.family}"
        yield Problem("unsupported", message, "train.loss", "leave it out")
    elif spec.train.loss and (reason := spec.model.record.refuses.get("loss")):
        message = f"`train.loss` is {spec.train.loss}, but {reason}"
        yield Problem("unsupported", message, "train.loss", "leave it out")
    elif spec.train.loss and backend not in (TORCH, AUTO):
        path = "kernels.linear_cross_entropy"
        message = f"`{path}` is {backend}, a kernel of cross-entropy, but `train.loss` is {spec.train.loss}"
        yield Problem("contradiction", message, path, f"set {path}={TORCH}, or leave out train.loss")
    if spec.train.loss_options and not spec.train.loss:
        message = "`train.loss_options` is for a user-defined loss, but `train.loss` has no value"
        yield Problem("unsupported", message, "train.loss_options", "leave it out, or set train.loss=FILE.py:NAME")


TEXT_SOURCES = ("python_stdlib", "text", "jsonl", "parquet", "arrow", "tokens")
"""Sources that work with a user-defined tokenizer, which encodes them or has already done so."""


def own_tokenizer(spec: RunSpec) -> Iterator[Problem]:
    data = spec.data
    tokenizer = spec.data.tokenizer
    key = TOKENIZER.key
    if not tokenizer.code:
        if tokenizer.options:
            message = f"`data.tokenizer.options` is for a user-defined tokenizer, but `{key}` has no value"
            yield Problem("unsupported", message, "data.tokenizer.options", f"leave it out, or set {key}=FILE.py:NAME")
        return
    for extension in TOKENIZER.named(tokenizer.code, tokenizer.options):
        yield from problems_of(extension)
    parts = () if data.is_own else tuple(data.parts.values())
    for source in {part.source for part in (*parts, *data.validation.values())} - {*TEXT_SOURCES}:
        message = f"`{key}` is {tokenizer.code}, but the source {source} does not work with a user-defined tokenizer"
        yield Problem("unsupported", message, key, f"it works with {', '.join(TEXT_SOURCES)} and user-defined sources")
    for path, value in (("path", tokenizer.path), ("end_of_document", tokenizer.end_of_document)):
        if value is not None:
            message = f"`data.tokenizer.{path}` is {value}, but the tokenizer is user-defined (`{key}`)"
            yield Problem("contradiction", message, f"data.tokenizer.{path}", f"set data.tokenizer.{path}=null")


def watchers(spec: RunSpec) -> Iterator[Problem]:
    for extension in worker_code_of(spec):
        if extension.kind in (CALLBACK, TRACKER):
            yield from problems_of(extension)


def source(spec: RunSpec) -> Iterator[Problem]:
    data = spec.data
    yield from _source(data, "data", SOURCES)
    for group in ("mixture", "validation"):
        for name, part in getattr(data, group).items():
            yield from _source(part, f"data.{group}.{name}", get_args(Documents))


def _source(data: DataSpec | PartSpec, where: str, built_in: Sequence[str]) -> Iterator[Problem]:
    if data.source not in SOURCES:
        yield from problems_of(Extension(SOURCE, f"{where}.source", data.source, tuple(data.options)), built_in)
        if data.path is not None:
            message = f"`{where}.path` is {data.path}, which a user-defined source does not receive"
            hint = f"set {where}.path=null {where}.options.path={data.path}"
            yield Problem("unsupported", message, f"{where}.path", hint)
    elif data.source not in built_in:
        message = f"`{where}.source` is {data.source}; expected {', '.join(built_in)}, or user-defined code"
        yield Problem("wrong_choice", message, f"{where}.source", f"set {where}.source=jsonl, or another of these")
    elif data.options:
        message = f"`{where}.options` is for a user-defined source, but `{where}.source` is {data.source}"
        yield Problem("unsupported", message, f"{where}.options", f"leave it out, or set {where}.source=FILE.py:NAME")


OWN_CODE_RULES = (source, own_tokenizer, block, loss, optimizer, watchers)


# Rules for single values: ranges of numbers, and text that becomes a line of a batch script or a folder path.


def forget_out_of_range(section: Any, prefix: str = "") -> tuple[Any, list[Problem]]:
    """Return `section` with UNKNOWN in place of each value that is out of range, and a problem for each of them.

    null and auto are within every range. The sections of a list are checked one by one."""
    changes: dict[str, object] = {}
    problems: list[Problem] = []
    ranges = ranges_of(section.__class__)
    for field in fields(section):
        value = getattr(section, field.name)
        path = f"{prefix}{field.name}"
        if is_dataclass(value):
            changes[field.name], found = forget_out_of_range(value, f"{path}.")
            problems += found
        elif isinstance(value, tuple) and any(map(is_dataclass, value)):
            items = [forget_out_of_range(item, f"{path}.{place}.") for place, item in enumerate(value)]
            changes[field.name] = tuple(item for item, _ in items)
            problems += [problem for _, found in items for problem in found]
        elif value is not UNKNOWN and value is not None and value != AUTO and field.name in ranges:
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(map(ranges[field.name].holds, numbers)):
                # Rules that use the value stop there, so none of them divides by zero or loops over 1e18 layers.
                changes[field.name] = UNKNOWN
                problems.append(_out_of_range(path, value, ranges[field.name]))
    return replace(section, **changes) if problems else section, problems


def _out_of_range(path: str, value: float | tuple[float, ...], allowed: Range) -> Problem:
    if isinstance(value, tuple):
        message = f"`{path}` is {list(value)}; expected numbers of {allowed.describe()}"
        return Problem("out_of_range", message, path)
    found = f"{value}; expected a whole number" if isinstance(value, int) else f"{value:g}; expected a number"
    fits = value <= allowed.low and allowed.includes_low
    hint = f"set {path}={allowed.low:g} or more" if fits else ""
    return Problem("out_of_range", f"`{path}` is {found} of {allowed.describe()}", path, hint)


def text_on_lines(spec: RunSpec) -> Iterator[Problem]:
    """Reject control characters: a line break would start a new line in job.sbatch, and others could hide text in it.

    `setup` is shell code, which may have several lines."""
    slurm = spec.cluster.slurm
    for field in fields(slurm):
        value = getattr(slurm, field.name)
        path = f"cluster.slurm.{field.name}"
        for text in value if isinstance(value, tuple) else (value,):
            yield from _check_text(path, text, may_have_lines=field.name == "setup")
    yield from _check_text("run.dir", spec.run.dir)


def _check_text(path: str, text: object, *, may_have_lines: bool = False) -> Iterator[Problem]:
    if not isinstance(text, str):  # a number, or a value of the wrong type (reported elsewhere)
        return
    if is_printable(text) if may_have_lines else text == on_one_line(text):
        return
    what = "control characters" if may_have_lines else "line breaks or other control characters"
    message = f"`{path}` is `{on_one_line(text)}`; it cannot hold {what}"
    yield Problem("bad_text", message, path, "remove the characters that are shown with a backslash")


TEXT_RULES = (text_on_lines,)


# Rules for the options of a Slurm job: formats of times, sizes and GPUs as in sbatch(1), and additional options that
# contradict the script.


PREFIX = "cluster.slurm"
_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?)|(?P<plain>\d+(:\d+){0,2})"
)
TIME_FORMS = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
NO_LIMIT = ("unlimited", "infinite")
"""Words that mean "no time limit" to Slurm."""
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
_GPUS = re.compile(r"(?:(?P<type>[\w.+-]*[A-Za-z_][\w.+-]*)(?::(?P<typed>[1-9]\d*))?|(?P<number>[1-9]\d*))", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)

OF_SCRIPT = {
    "job-name": f"{PREFIX}.job_name",
    "nodes": "cluster.num_nodes",
    "ntasks": "cluster.num_nodes and cluster.devices_per_node: each node has one task, which starts its processes",
    "ntasks-per-node": "cluster.devices_per_node: each node has one task, which starts its processes",
    "output": "run.dir, whose logs/ contains the job's log",
    "open-mode": "the script: a requeued job continues its log",
    "array": "--sweep, which creates the array",
    "signal": f"{PREFIX}.warn_s",
    "requeue": f"{PREFIX}.max_requeues",
    "no-requeue": f"{PREFIX}.max_requeues=0",
}
"""Options that every script contains -> where they are set."""
KEYS = {
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "time": "time",
    "constraint": "constraint",
    "exclude": "exclude",
    "dependency": "dependency",
    "mem": "mem",
    "mem-per-cpu": "mem",
    "mem-per-gpu": "mem",
    "cpus-per-task": "cpus_per_task",
    "exclusive": "exclusive",
    "oversubscribe": "exclusive",
}
"""Options that would contradict a key of `cluster.slurm` if it is set -> that key."""
OF_GPUS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres")
SHORT = {
    "J": "job-name",
    "N": "nodes",
    "n": "ntasks",
    "o": "output",
    "a": "array",
    "p": "partition",
    "A": "account",
    "q": "qos",
    "t": "time",
    "c": "cpus-per-task",
    "C": "constraint",
    "x": "exclude",
    "d": "dependency",
    "G": "gpus",
    "s": "oversubscribe",
}
"""sbatch's short names of those options."""


def time_limit_s(text: str) -> float | None:
    """Convert a time in one of Slurm's formats to seconds: infinity for no limit, None for any other text."""
    if text.lower() in NO_LIMIT:
        return float("inf")
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    if plain := found["plain"]:
        # Slurm reads one number as minutes, two as minutes and seconds, and three as hours, minutes and seconds.
        numbers = [int(part) for part in plain.split(":")]
        hours, minutes, seconds = [0, *numbers, 0] if len(numbers) == 1 else [0] * (3 - len(numbers)) + numbers
        days = 0
    else:
        days, hours, minutes, seconds = (int(found[part] or 0) for part in ("days", "hours", "minutes", "seconds"))
    # 0 means no limit.
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds or float("inf")


def gpus_of_node(text: str, devices: int) -> str | None:
    """Return a node's GPUs in Slurm's format, `h100:8` or `8`; a type without a number gets `devices`. None if the text
    is not a type, a number or both."""
    found = _GPUS.fullmatch(text)
    if found is None:
        return None
    return f"{text}:{devices}" if found["type"] and not found["typed"] else text


def times(spec: RunSpec) -> Iterator[Problem]:
    slurm = spec.cluster.slurm
    path = f"{PREFIX}.time"
    if slurm.time is None:
        return
    limit_s = time_limit_s(str(slurm.time))
    if limit_s is None:
        message = f"`{path}` is `{slurm.time}`, which is not a Slurm time; expected {TIME_FORMS}"
        yield Problem("bad_time", message, path, f"for two hours, set {path}=2:00:00 (2:00 means two minutes)")
    elif limit_s <= slurm.warn_s:
        read = f"{limit_s:g} s" + (" (a plain number is minutes)" if str(slurm.time).isdigit() else "")
        message = f"`{path}` is `{slurm.time}`, {read}: the job would receive its stop signal as soon as it starts"
        hint = (
            f"type a longer one, such as {path}=2:00:00 for two hours, or {PREFIX}.warn_s below {limit_s:g} "
            f"(it is {slurm.warn_s})"
        )
        yield Problem("out_of_range", message, path, hint)


def memory(spec: RunSpec) -> Iterator[Problem]:
    text = spec.cluster.slurm.mem
    path = f"{PREFIX}.mem"
    if text is not None and not _MEMORY.fullmatch(str(text)):
        message = f"`{path}` is `{text}`; expected a whole number with K, M, G or T"
        yield Problem(
            "bad_size", message, path, f"for example, set {path}=64G, or {path}=0G for all of a node's memory"
        )


def gpus(spec: RunSpec) -> Iterator[Problem]:
    slurm = spec.cluster.slurm
    devices = spec.cluster.devices_per_node
    path = f"{PREFIX}.gpus_per_node"
    text = slurm.gpus_per_node
    if text is None:
        return
    found = _GPUS.fullmatch(str(text))
    if found is None:
        message = f"`{path}` is `{text}`; expected a type and number such as h100:8, a number or a type"
        hint = f"to select the option that requests GPUs, set {PREFIX}.gpu_request=gres"
        yield Problem("bad_gpus", message, path, hint)
    elif slurm.gpu_request == "none":
        message = f"`{path}` is `{text}`, but `{PREFIX}.gpu_request` is none, which requests no GPUs"
        yield Problem("unsupported", message, path, f"remove one of them, or set {PREFIX}.gpu_request=gres")
    elif spec.cluster.device == "cuda" and isinstance(devices, int):
        # A type without a number requests as many GPUs as the run uses.
        asked = int(found["typed"] or found["number"] or devices)
        if asked < devices:
            message = f"`{path}` requests {asked} GPUs per node, but `cluster.devices_per_node` uses {devices}"
            yield Problem("out_of_range", message, path, f"set cluster.devices_per_node={asked}, or request {devices}")


def container(spec: RunSpec) -> Iterator[Problem]:
    slurm = spec.cluster.slurm
    keys = ("container_runtime", "container_mounts", "container_python", "container_gpus", "container_env")
    defaults = {name: slurm.__dataclass_fields__[name].default for name in keys}
    for name in keys if slurm.container_image is None else ():
        if getattr(slurm, name) != defaults[name]:
            path = f"{PREFIX}.{name}"
            message = f"`{path}` is set, but `{PREFIX}.container_image` is null, so there is no container"
            yield Problem("unsupported", message, path, f"set {PREFIX}.container_image=/images/torch.sif")
    for mount in slurm.container_mounts.split(",") if slurm.container_mounts is not None else ():
        parts = mount.split(":")
        if not all(parts) or len(parts) > 3:
            path = f"{PREFIX}.container_mounts"
            message = f"`{path}` has `{mount}`; expected OUTSIDE:INSIDE or OUTSIDE:INSIDE:OPTIONS"
            yield Problem("bad_mount", message, path, "such as /data:/data:ro; separate several by commas")
    for name in slurm.container_env:
        if not _VARIABLE.fullmatch(name):
            path = f"{PREFIX}.container_env"
            message = f"`{path}` has `{name}`, which is not the name of a variable (its value is taken from outside)"
            yield Problem("bad_name", message, path, f"such as {path}=[NCCL_IB_HCA]")
    if slurm.container_image is not None and slurm.container_runtime == "pyxis" and slurm.container_gpus != "auto":
        path = f"{PREFIX}.container_gpus"
        message = f"`{path}` is {slurm.container_gpus}, but pyxis has no such option: the site's hooks assign GPUs"
        yield Problem("unsupported", message, path, f"leave it out, or set {PREFIX}.container_runtime=apptainer")


def further_options(spec: RunSpec) -> Iterator[Problem]:
    """Reject additional options that the script already contains, because sbatch silently uses the last one."""
    slurm = spec.cluster.slurm
    path = f"{PREFIX}.sbatch_lines"
    # An option whose key is not set does not appear in the script, so nothing contradicts it.
    set_keys = {option: f"{PREFIX}.{key}" for option, key in KEYS.items() if getattr(slurm, key) not in (None, False)}
    owners = {**OF_SCRIPT, **set_keys}
    if slurm.gpu_request != "none" and (spec.cluster.device == "cuda" or slurm.gpus_per_node is not None):
        owners |= dict.fromkeys(OF_GPUS, f"{PREFIX}.gpus_per_node ({PREFIX}.gpu_request=none requests no GPUs)")
    for line in slurm.sbatch_lines:
        if not line.lstrip().startswith("-"):
            message = f"`{path}` has `{line}`, which is not an option of sbatch: it follows #SBATCH in the script"
            yield Problem("bad_option", message, path, "write only the option, such as --mail-type=END")
            continue
        for name, value in _options(line):
            if name not in owners or (name == "gres" and slurm.gpu_request != "gres" and "gpu" not in value):
                continue
            message = f"`{path}` has `{line}`, but the script already has it, and sbatch would use only one of them"
            yield Problem("contradiction", message, path, f"leave it out; it is set by {owners[name]}")


def _options(line: str) -> Iterator[tuple[str, str]]:
    """Yield the options of a line by their long names, each with its value."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # an unmatched quote, which sbatch itself rejects
        return
    for place, word in enumerate(words):
        following = words[place + 1] if place + 1 < len(words) else ""
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            yield name, value if equals else following
        elif word.startswith("-") and word[1:2] in SHORT:
            yield SHORT[word[1]], word[2:] or following


SLURM_RULES = (times, memory, gpus, container, further_options)


# Rules for a batch size that changes during the run.


SCHEDULE_PATH = "batching.schedule"
LARGEST = f"{SCHEDULE_PATH}.max_global_batch_size"
WITH_LARGEST = ("seesaw", "noise")
"""Schedules with a maximum batch size."""


def largest_size(spec: RunSpec) -> float:
    """Return the limit of the batch size with `seesaw` or `noise`; infinity if nothing limits it.

    Seesaw never exceeds the batch size that the lowest learning rate implies."""
    batching = spec.batching
    largest = math.inf
    if batching.schedule.kind == "seesaw" and spec.optim.schedule.lowest_lr_ratio:
        largest = batching.global_batch_size / spec.optim.schedule.lowest_lr_ratio
    return min(largest, batching.schedule.max_global_batch_size or math.inf)


def ramp(spec: RunSpec) -> Iterator[Problem]:
    """Require stages in ascending order, with sizes that never decrease."""
    kind = spec.batching.schedule.kind
    stages = spec.batching.schedule.stages
    path = f"{SCHEDULE_PATH}.stages"
    if kind != "ramp" and stages:
        message = f"`{path}` has {len(stages)} sizes, but `{SCHEDULE_PATH}.kind` is {kind}, which has no stages"
        yield Problem("unsupported", message, path, f"set {SCHEDULE_PATH}.kind=ramp, or ~{path}")
    elif kind == "ramp" and not stages:
        doubled = 2 * spec.batching.global_batch_size
        hint = f"set {path}='[{{from_tokens: 1e9, global_batch_size: {doubled}}}]'"
        yield Problem("missing_value", f"`{path}` is empty; a ramp needs at least one stage", path, hint)
    elif kind == "ramp":
        first = RampStage(0, spec.batching.global_batch_size)
        for place, (before, stage) in enumerate(pairwise((first, *stages))):
            if stage.from_tokens <= before.from_tokens:
                begin = f"{path}.{place}.from_tokens"
                message = f"`{begin}` is {stage.from_tokens}, but the previous stage begins at {before.from_tokens}"
                hint = f"order the stages by tokens: {before.from_tokens + 1} or more"
                yield Problem("out_of_range", message, begin, hint)
            if stage.global_batch_size < before.global_batch_size:
                size = f"{path}.{place}.global_batch_size"
                before_it = f"the steps before it have {before.global_batch_size} samples"
                message = f"`{size}` is {stage.global_batch_size}, but {before_it}"
                hint = f"a ramp never shrinks the batch: set {before.global_batch_size} or more"
                yield Problem("out_of_range", message, size, hint)


def bounds(spec: RunSpec) -> Iterator[Problem]:
    """Reject a maximum size for a schedule that does not use one, and a maximum that leaves the batch no room to
    grow."""
    schedule = spec.batching.schedule
    start = spec.batching.global_batch_size
    largest = schedule.max_global_batch_size
    if schedule.kind not in WITH_LARGEST:
        if largest is not None:
            message = (
                f"`{LARGEST}` is {largest}, but `{SCHEDULE_PATH}.kind` is {schedule.kind}, which has no largest size"
            )
            yield Problem("unsupported", message, LARGEST, f"set {LARGEST}=null, or batching=seesaw")
    elif largest is not None and largest < start:
        message = f"`{LARGEST}` is {largest}, but the run begins with {start} (`batching.global_batch_size`)"
        yield Problem("out_of_range", message, LARGEST, f"set {LARGEST}={math.ceil(start * schedule.growth)} or more")
    elif math.isinf(largest_size(spec)):
        zero = "the learning rate ends at 0" if schedule.kind == "seesaw" else "the noise scale has no limit"
        hint = f"set {LARGEST}={8 * start}, or a value that the data's critical batch size allows"
        yield Problem("missing_value", f"`{LARGEST}` is null and {zero}, so the batch has no limit", LARGEST, hint)
    elif _falls(spec) and len(spec.batching.sizes_up_to(largest_size(spec))) == 1:
        message = (
            f"a `{SCHEDULE_PATH}.growth` of {schedule.growth:g} gives no size between {start} and the largest, "
            f"{largest_size(spec):g}: the batch would never change"
        )
        hint = f"set {SCHEDULE_PATH}.growth=1.1, a larger {LARGEST}, or {SCHEDULE_PATH}.kind=constant"
        yield Problem("out_of_range", message, f"{SCHEDULE_PATH}.growth", hint)


def _falls(spec: RunSpec) -> bool:
    return spec.batching.schedule.kind != "seesaw" or spec.optim.schedule.lowest_lr_ratio < 1


def seesaw(spec: RunSpec) -> Iterator[Problem]:
    """Require a falling learning rate and a rule for scaling it, because seesaw replaces the fall with a growing
    batch."""
    if spec.batching.schedule.kind != "seesaw":
        return
    if not _falls(spec):
        lr = spec.optim.schedule
        message = f"`{SCHEDULE_PATH}.kind` is seesaw, which grows the batch as the learning rate falls, but it does not"
        path = "optim.schedule.kind" if lr.kind == "constant" else "optim.schedule.final_lr_ratio"
        if lr.kind == "wsd" and lr.decay_fraction == 0:
            path = "optim.schedule.decay_fraction"
        typed = {"kind": "cosine", "final_lr_ratio": "0.1", "decay_fraction": "0.2"}[path.rpartition(".")[2]]
        yield Problem("unsupported", message, path, f"set {path}={typed}, or {SCHEDULE_PATH}.kind=constant")
    if spec.batching.schedule.lr_rule == "none":
        path = f"{SCHEDULE_PATH}.lr_rule"
        message = f"`{path}` is none: the learning rate would fall as it does without seesaw, while the batch grows too"
        yield Problem("unsupported", message, path, f"set {path}=optimizer")


def noise(spec: RunSpec) -> Iterator[Problem]:
    """Require two data-parallel ranks, because noise is measured between them; `measurable_noise` checks what is known
    only once the run is planned."""
    devices = spec.cluster.devices_per_node
    axes = (spec.layout.pp, spec.layout.cp, spec.layout.tp)
    if spec.batching.schedule.kind != "noise" or devices == AUTO or AUTO in axes:
        return  # the number of ranks is determined by the machine or a search
    if divmod(spec.cluster.num_nodes * int(devices), math.prod(map(int, axes))) == (1, 0):
        message = f"`{SCHEDULE_PATH}.kind` is noise, which is measured between data-parallel ranks, but there is only 1"
        hint = f"set cluster.devices_per_node=2 or more with room for data parallelism, or {SCHEDULE_PATH}.kind=seesaw"
        yield Problem("unsupported", message, f"{SCHEDULE_PATH}.kind", hint)


def noise_hindrance(model: ModelSpec, layout: Layout, replica_groups: int, micro_batches: int) -> str:
    """Return why the gradient noise cannot be measured in a layout; "" if it can.

    Noise is measured between the gradients of different samples before they are summed. If each of a rank's
    `micro_batches` is exchanged separately, each one counts as a part."""
    turns = micro_batches if layout.exchanges_every_backward else 1
    if layout.data_parallel_size * replica_groups < 2:
        return "it is measured between data-parallel ranks, but there is only 1"
    if embeds_at_both_ends(model) and layout.pp > 1 and layout.exchanges_every_backward:
        which = "a tied embedding" if model.tied_embeddings else "the embedding, which prediction layers read,"
        return f"ZeRO-{layout.zero_stage} sums the gradient of {which} separately on each of its stages"
    ranks, left = divmod(layout.ep, layout.cp * layout.tp)
    if layout.ep > 1 and left:
        return f"the {layout.ep} ranks of ep hold parts of a sample's gradient"
    if layout.ep > 1 and layout.data_parallel_size // ranks * replica_groups * turns < 2:
        return "all data-parallel ranks train the same experts together"
    return ""


def measurable_noise(spec: RunSpec, layout: Layout, replica_groups: int, micro_batches: int) -> Iterator[Problem]:
    """Reject a batch that follows the gradient noise if the layout does not allow measuring it."""
    if spec.batching.schedule.kind != "noise":
        return
    why = noise_hindrance(spec.model, layout, replica_groups, micro_batches)
    if replica_groups > 1:
        message = f"`{SCHEDULE_PATH}.kind` is noise, but a restarted replica group (of {replica_groups})"
        message += " does not know the measured noise"
        hint = f"set resilience=restart, or {SCHEDULE_PATH}.kind=seesaw"
        yield Problem("unsupported", message, f"{SCHEDULE_PATH}.kind", hint)
    elif why:
        message = f"`{SCHEDULE_PATH}.kind` is noise, not measurable in this layout ({layout.describe()}): {why}"
        hint = f"set layout=ddp cluster.devices_per_node=2 (or more), or {SCHEDULE_PATH}.kind=seesaw"
        yield Problem("unsupported", message, f"{SCHEDULE_PATH}.kind", hint)


BATCHING_RULES = (ramp, bounds, seesaw, noise)
