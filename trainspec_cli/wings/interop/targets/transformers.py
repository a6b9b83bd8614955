"""transformers: the Trainer's arguments as JSON, for the user's script, which Accelerate starts."""

from __future__ import annotations

from dataclasses import replace

from trainspec_cli.wings.interop.not_carried import SCRIPT
from trainspec_cli.wings.interop.table import (
    COSINE,
    WSD,
    Choice,
    Fixed,
    LastSteps,
    Line,
    OrNone,
    RunValues,
    given,
    unless,
)
from trainspec_cli.wings.interop.target import (
    FOLDER,
    USER_SCRIPT,
    Target,
    Translation,
    json_file,
    options,
    shell_script,
    yaml_file,
)
from trainspec_cli.wings.interop.targets import accelerate

ARGUMENTS = "training_args.json"
WARMUP = "the Trainer's warm-up starts at 0, one update behind trainspec's"
ANY_ADAM = given("optim.name", "adamw", "adamw8bit")
BITSANDBYTES = "bitsandbytes' quantisation blocks have a different size"
SAVES = unless("checkpoint.interval_steps", None)
NO_END = "the Trainer writes no final checkpoint: call save_model in your script"


SET_BY_TRAINER = ("recompute", "compile", "derived.grad_accum_steps")
"""Keys that the Trainer passes on to Accelerate."""
BY_ACCELERATE = tuple(
    replace(line, destination="launcher") for line in accelerate.LINES if line.ours not in SET_BY_TRAINER
)
UPDATE = (
    Line("optim.lr", "learning_rate"),
    Line("optim.beta1", "adam_beta1", when=(ANY_ADAM,)),
    Line("optim.beta2", "adam_beta2", when=(ANY_ADAM,)),
    Line("optim.eps", "adam_epsilon", when=(ANY_ADAM,)),
    Line("optim.weight_decay", "weight_decay"),
    Line("optim.grad_clip_norm", "max_grad_norm", OrNone(0.0)),
)
"""Arguments with the same names as in axolotl, which uses the Trainer."""
BY_TRAINER = (
    Line("batching.micro_batch_size", "per_device_train_batch_size"),
    Line("derived.grad_accum_steps", "gradient_accumulation_steps"),
    Line("batching.global_batch_size", ""),
    Line("train.max_steps", "max_steps"),
    Line("train.seed", "seed"),
    Line(
        "optim.name",
        "optim",
        Choice({"adamw": "adamw_torch_fused", "sgd": "sgd"}),
        when=(unless("optim.name", "adamw8bit"),),
    ),
    Line(
        "optim.name",
        "optim",
        Choice({"adamw8bit": "adamw_8bit"}),
        when=(given("optim.name", "adamw8bit"),),
        approximate=BITSANDBYTES,
    ),
    *UPDATE,
    Line(
        "optim.schedule.kind",
        "lr_scheduler_type",
        Choice({"constant": "constant_with_warmup", "cosine": "cosine_with_min_lr", "wsd": "warmup_stable_decay"}),
        approximate=WARMUP,
    ),
    Line("optim.schedule.warmup_steps", "warmup_steps"),
    Line("optim.schedule.final_lr_ratio", "lr_scheduler_kwargs.min_lr_rate", when=(COSINE,)),
    Line("optim.schedule.final_lr_ratio", "lr_scheduler_kwargs.min_lr_ratio", when=(WSD,)),
    Line("optim.schedule.decay_fraction", "lr_scheduler_kwargs.num_decay_steps", LastSteps(), when=(WSD,)),
    Line("precision.compute", "bf16", Choice({"bf16": True}), when=(given("precision.compute", "bf16"),)),
    Line("precision.compute", "fp16", Choice({"fp16": True}), when=(given("precision.compute", "fp16"),)),
    Line("precision.compute", "tf32", Choice({"tf32": True}), when=(given("precision.compute", "tf32"),)),
    Line("precision.compute", "", when=(given("precision.compute", "fp32"),)),
    Line("recompute", "gradient_checkpointing", Choice({"none": False, "full": True})),
    Line("compile", "torch_compile"),
    Line("checkpoint.interval_steps", "save_steps", when=(SAVES,)),
    Line(
        "checkpoint.interval_steps",
        "save_strategy",
        Choice({None: "no"}),
        when=(given("checkpoint.interval_steps", None),),
        approximate=NO_END,
    ),
    Line("checkpoint.keep_last", "save_total_limit"),
    Line("train.eval_interval_steps", "eval_steps", when=(unless("train.eval_interval_steps", None),)),
    Line("train.log_interval_steps", "logging_steps"),
    Line("cluster.device", "use_cpu", Choice({"cuda": False, "cpu": True})),
)

FIXED = (
    *(
        replace(fixed, destination="launcher") if fixed.destination == "config" else fixed
        for fixed in accelerate.FIXED
        if not fixed.theirs.startswith("dynamo")
    ),
    Fixed("output_dir", "output", "the folder for checkpoints"),
    Fixed("lr_scheduler_kwargs.decay_type", "linear", "trainspec's decay is linear", (WSD,)),
    Fixed("save_strategy", "steps", "the checkpoint interval is in steps", (SAVES,)),
    Fixed("eval_strategy", "steps", "the interval is in steps", (unless("train.eval_interval_steps", None),)),
)

LIMITS = {
    **accelerate.LIMITS,
    "recompute": "the Trainer can only recompute entire blocks",
    "optim.name": "",
    "train.early_stop_evals": "your script passes an EarlyStoppingCallback",
    "checkpoint.keep_best": "the Trainer needs the name of your metric (load_best_model_at_end)",
}
OF_SCRIPT = {
    **{key: SCRIPT[key] for key in ("model", "lora", "init", "data")},
    "checkpoint.mode": "the Trainer writes checkpoints synchronously",
}


def render(translation: Translation, run: RunValues) -> dict[str, str]:
    about = f"Starts your script with Accelerate; its Trainer reads {ARGUMENTS} of {run.recipe}."
    command = [
        *accelerate.launch_words(run),
        *options(translation.keys_of("command")),
        '"$SCRIPT"',
        f"{FOLDER}/{ARGUMENTS}",
    ]
    return {
        ARGUMENTS: json_file(translation.keys_of("config")),
        accelerate.CONFIG: yaml_file(translation.keys_of("launcher")),
        "launch.sh": shell_script(about, command, {}, needs=[USER_SCRIPT]),
    }


TARGET = Target(
    "transformers", "transformers", "5.23.0", (*BY_TRAINER, *BY_ACCELERATE), render, FIXED, LIMITS, OF_SCRIPT
)
