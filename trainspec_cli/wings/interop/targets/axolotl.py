"""axolotl: the YAML for `axolotl train`, which trains existing weights, and the command that starts it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import yaml

from trainspec_cli.core.errors import Problem
from trainspec_cli.core.json_value import JsonValue
from trainspec_cli.wings.interop.table import (
    COSINE,
    REPLICATED,
    SHARDED,
    WSD,
    Choice,
    Fixed,
    LastSteps,
    Line,
    RunValues,
    UnsupportedValueError,
    WholeNumber,
    Within,
    given,
    show,
    unless,
)
from trainspec_cli.wings.interop.target import FOLDER, Keys, Target, Translation, nest, shell_script, torchrun
from trainspec_cli.wings.interop.targets.transformers import UPDATE

FILE = "axolotl.yml"
DATASET = "datasets[0]."
"""Prefix of the keys of the only dataset in an emitted file."""


MODULES: Mapping[str, str] = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "out": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
"""Names of a block's matrices in recipes -> in Hugging Face's decoders."""


@dataclass(frozen=True)
class Modules:
    """Converts the names of the matrices that get an adapter."""

    def write(self, value: JsonValue, run: RunValues) -> JsonValue:
        assert isinstance(value, list)
        return [_renamed(one, MODULES) for one in value]

    def read(self, value: JsonValue, known: RunValues) -> JsonValue:
        if not isinstance(value, list):
            raise UnsupportedValueError(f"a list of {', '.join(MODULES.values())}")
        return [_renamed(one, {theirs: ours for ours, theirs in MODULES.items()}) for one in value]


def _renamed(name: JsonValue, names: Mapping[str, str]) -> str:
    if str(name) not in names:
        raise UnsupportedValueError(", ".join(names))
    return names[str(name)]


BASE_MODEL = Within("hf:FOLDER or hf:ORG/NAME", "{key}=hf:FOLDER", begin="hf:", refused="@")
TOKENIZER_FOLDER = Within("FOLDER/tokenizer.json", end="/tokenizer.json")
ONE_FILE = Within("the path of one file or folder", "{key}=FILE", refused="*")
KINDS = Choice({"jsonl": "json", "parquet": "parquet", "text": "text"})
BY_FSDP = unless("derived.is_ddp", True)
CHAT = given("data.source", "chat")
TEXT = given("data.source", "jsonl", "parquet", "text", "arrow")
ADAPTED = unless("lora.rank", 0)
SAVES = unless("checkpoint.interval_steps", None)
EVALUATED = unless("train.eval_interval_steps", None)
FILE_TEMPLATE = unless("data.chat_template", None, "chatml")

WARMUP = "axolotl's warm-up starts at 0, one update behind trainspec's"
TWO_STEPS = "axolotl warms up for at least two steps"
REDUCED = "gradients are summed in the compute format"
WEIGHTS_TOO = "axolotl loads weights in this format and, without FSDP, keeps them in it"
BLOCKS = "torchao's quantisation blocks have a different size"
AT_RANDOM = "axolotl holds out random samples; trainspec selects them by a hash"
ONCE = "axolotl also evaluates once before the first step"
AT_THE_END = "axolotl writes the model at the end of the run, but no state to resume from"
PACKED = "packed documents do not attend to each other"

MODEL = (
    Line("init.from", "base_model", BASE_MODEL),
    Line("data.tokenizer.path", "tokenizer_config", TOKENIZER_FOLDER, when=(unless("data.tokenizer.path", None),)),
    Line("lora.base", "adapter", Choice({"full": "lora", "nf4": "qlora"}), when=(ADAPTED,)),
    Line("lora.base", "load_in_4bit", Choice({"full": False, "nf4": True}), when=(ADAPTED,)),
    Line("lora.rank", "lora_r", when=(ADAPTED,)),
    Line("lora.magnitude", "peft_use_dora", when=(ADAPTED,)),
    Line("lora.alpha", "lora_alpha", WholeNumber(), when=(ADAPTED,)),
    Line("lora.targets", "lora_target_modules", Modules(), when=(ADAPTED,)),
)
DATA = (
    Line("data.seq_len", "sequence_len"),
    Line("data.path", f"{DATASET}path", ONE_FILE),
    Line("data.source", f"{DATASET}type", Choice({"chat": "chat_template"}), when=(CHAT,)),
    Line("data.source", f"{DATASET}ds_type", KINDS, when=(unless("data.source", "chat", "arrow"),)),
    Line("data.source", "", Choice({"arrow": None}), when=(given("data.source", "arrow"),)),
    Line("data.text_field", f"{DATASET}field", when=(given("data.source", "jsonl", "parquet", "arrow"),)),
    Line(
        "data.chat_template",
        f"{DATASET}chat_template",
        Choice({None: "tokenizer_default", "chatml": "chatml"}),
        when=(CHAT, given("data.chat_template", None, "chatml")),
    ),
    Line("data.chat_template", f"{DATASET}chat_template_jinja", when=(CHAT, FILE_TEMPLATE)),
    Line("data.loss_on", "train_on_inputs", Choice({"replies": False, "all": True}), when=(CHAT,)),
    Line("data.heldout_fraction", "val_set_size", approximate=AT_RANDOM),
    Line(
        "data.document_masks",
        "",
        Choice({False: None}),
        when=(TEXT, given("data.document_masks", False)),
        approximate=PACKED,
    ),
    Line("data.document_masks", "", when=(given("data.document_masks", True),)),
)
LAYOUT = (
    Line("layout.dp_replicate", "dp_replicate_size", when=(BY_FSDP,)),
    Line("layout.dp_shard", "dp_shard_size", when=(BY_FSDP,)),
    Line("layout.dp_replicate", "", when=(REPLICATED,)),
    Line("layout.tp", "tensor_parallel_size", when=(BY_FSDP,)),
    Line("layout.cp", "context_parallel_size", when=(BY_FSDP,)),
    Line("layout.context_method", "", Choice({"ring": None}), when=(unless("layout.cp", 1),)),
    Line(
        "layout.zero_stage",
        "fsdp_config.reshard_after_forward",
        Choice({3: True, 2: False}),
        when=(BY_FSDP, SHARDED),
    ),
)
REST = (
    Line("batching.micro_batch_size", "micro_batch_size"),
    Line("derived.grad_accum_steps", "gradient_accumulation_steps"),
    Line("batching.global_batch_size", ""),
    Line("train.max_steps", "max_steps"),
    Line("train.seed", "seed", approximate="axolotl orders the samples differently"),
    Line("train.log_interval_steps", "logging_steps"),
    Line("train.eval_interval_steps", "eval_steps", when=(EVALUATED,)),
    Line(
        "train.eval_interval_steps",
        "eval_strategy",
        Choice({None: "no"}),
        when=(given("train.eval_interval_steps", None),),
        approximate=ONCE,
    ),
    Line(
        "precision.compute",
        "fp16",
        Choice({"fp16": True}),
        when=(given("precision.compute", "fp16"),),
        approximate=WEIGHTS_TOO,
    ),
    Line("precision.compute", "tf32", Choice({"tf32": True}), when=(given("precision.compute", "tf32"),)),
    Line(
        "precision.compute",
        "bf16",
        Choice({"bf16": True}),
        when=(given("precision.compute", "bf16"),),
        approximate=WEIGHTS_TOO,
    ),
    Line("precision.compute", "", when=(given("precision.compute", "fp32"),)),
    Line(
        "precision.reduce",
        "",
        Choice({"fp32": None, "bf16": None}),
        when=(given("precision.compute", "bf16", "fp16"),),
        approximate=REDUCED,
    ),
    Line("precision.reduce", "", Choice({"fp32": None}), when=(unless("precision.compute", "bf16", "fp16"),)),
    Line(
        "optim.name",
        "optimizer",
        Choice({"adamw": "adamw_torch_fused", "sgd": "sgd"}),
        when=(unless("optim.name", "adamw8bit"),),
    ),
    Line(
        "optim.name",
        "optimizer",
        Choice({"adamw8bit": "adamw_torch_8bit"}),
        when=(given("optim.name", "adamw8bit"),),
        approximate=BLOCKS,
    ),
    *UPDATE,
    Line(
        "optim.schedule.kind",
        "lr_scheduler",
        Choice({"constant": "constant_with_warmup", "cosine": "cosine", "wsd": "warmup_stable_decay"}),
        approximate=WARMUP,
    ),
    Line("optim.schedule.warmup_steps", "warmup_steps", when=(unless("optim.schedule.warmup_steps", 1),)),
    Line(
        "optim.schedule.warmup_steps",
        "warmup_steps",
        when=(given("optim.schedule.warmup_steps", 1),),
        approximate=TWO_STEPS,
    ),
    Line("optim.schedule.final_lr_ratio", "cosine_min_lr_ratio", when=(COSINE,)),
    Line("optim.schedule.final_lr_ratio", "lr_scheduler_kwargs.min_lr_ratio", when=(WSD,)),
    Line("optim.schedule.decay_fraction", "lr_scheduler_kwargs.num_decay_steps", LastSteps(), when=(WSD,)),
    Line("recompute", "gradient_checkpointing", Choice({"none": False, "full": True})),
    Line("compile", "torch_compile"),
    Line("checkpoint.interval_steps", "save_steps", when=(SAVES,)),
    Line(
        "checkpoint.interval_steps",
        "save_strategy",
        Choice({None: "no"}),
        when=(given("checkpoint.interval_steps", None),),
        approximate=AT_THE_END,
    ),
    Line("checkpoint.keep_last", "save_total_limit"),
    Line("cluster.num_nodes", "--nnodes", destination="command"),
    Line("cluster.devices_per_node", "--nproc-per-node", destination="command"),
    Line("cluster.device", "", Choice({"cuda": None})),
)
FIXED = (
    Fixed(f"{DATASET}type", "completion", "the loss covers every token of a document", (TEXT,)),
    Fixed("sample_packing", True, "trainspec fills samples with several documents"),
    Fixed("pad_to_sequence_len", True, "every sample has data.seq_len tokens"),
    Fixed("attn_implementation", "flash_attention_2", "packed samples and ring attention require it"),
    Fixed("fsdp_version", 2, "only FSDP2 supports meshes of several axes", (BY_FSDP,)),
    Fixed("fsdp_config.auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "each block is sharded separately", (BY_FSDP,)),
    Fixed("fsdp_config.state_dict_type", "SHARDED_STATE_DICT", "each rank writes its shard of the state", (BY_FSDP,)),
    Fixed("fsdp_config.offload_params", False, "the sharded state is not offloaded", (BY_FSDP,)),
    Fixed("bf16", False, "axolotl would choose bf16", (unless("precision.compute", "bf16"),)),
    Fixed("gradient_checkpointing_kwargs.use_reentrant", False, "FSDP2 needs it", (given("recompute", "full"),)),
    Fixed("lr_scheduler_kwargs.decay_type", "linear", "trainspec's decay is linear", (WSD,)),
    Fixed("output_dir", "output", "checkpoints go there"),
)
LIMITS = {
    "init.from": "axolotl always trains an existing model (base_model)",
    "data.source": "axolotl reads files of text or conversations",
    "layout.zero_stage": "FSDP2 always shards gradients: stage 2 keeps parameters after the forward pass, 3 frees them",
    "layout.pp": "axolotl has no pipeline parallelism",
    "layout.ep": "axolotl's expert parallelism is a separate plugin",
    "layout.sequence_parallel": "axolotl's tensor parallelism does not shard activations between matrices",
    "layout.context_method": "axolotl uses the ring attention of ring-flash-attn",
    "lora.targets": "the names of other matrices depend on the model: set lora_target_modules yourself",
    "precision.reduce": "",
    "precision.matmul": "axolotl uses torchao's fp8, which scales differently (fp8_config)",
    "offload": "FSDP offloads parameters, gradients and optimizer state together",
    "recompute": "axolotl's selective_checkpointing keeps the attention and recomputes everything else",
    "optim.name": "axolotl's other optimizers have different constants",
    "train.early_stop_evals": "axolotl's early_stopping_patience needs an eval_steps that divides save_steps",
    "checkpoint.keep_best": "axolotl needs the name of a metric (metric_for_best_model)",
    "cluster.device": "axolotl only trains on GPUs",
}
NOT_CARRIED = {
    "model": "base_model's config.json defines the model",
    "checkpoint.mode": "axolotl writes checkpoints synchronously",
}


def refused_together(run: RunValues) -> Iterator[Problem]:
    """Yield a problem if context parallelism would have to shard several packed samples at once."""
    if run["layout.cp"] != 1 and run["batching.micro_batch_size"] != 1:
        size = show(run["batching.micro_batch_size"])
        message = f"`batching.micro_batch_size` is {size}, but cp shards packed samples one at a time"
        yield Problem("not_said", message, "batching.micro_batch_size", "set batching.micro_batch_size=1")


def config_text(keys: Keys) -> str:
    """Return the YAML; the dataset keys become the only item in `datasets`."""
    dataset = {key.removeprefix(DATASET): value for key, value in keys.items() if key.startswith(DATASET)}
    others = nest({key: value for key, value in keys.items() if not key.startswith(DATASET)})
    text: str = yaml.safe_dump({**others, "datasets": [dataset]}, sort_keys=False)
    return text


def render(translation: Translation, run: RunValues) -> dict[str, str]:
    about = f"Trains {run.recipe} with axolotl, using the configuration next to this file."
    command = torchrun(run.whole("cluster.num_nodes"), run.whole("cluster.devices_per_node"))
    command += ["-m axolotl.cli.train", f"{FOLDER}/{FILE}"]
    return {FILE: config_text(translation.keys_of("config")), "launch.sh": shell_script(about, command, {})}


def complete(values: dict[str, JsonValue], keys: Keys) -> dict[str, JsonValue]:
    """Complete the values that were read. Without FSDP, the state is not sharded; the batch size follows from the
    data-parallel degrees."""
    if keys.get("bf16") is False and "precision.compute" not in values:
        values["precision.compute"] = "fp32"
    if "fsdp_config" not in {key.partition(".")[0] for key in keys}:
        values |= {"layout.dp_shard": 1, "layout.dp_replicate": "auto"}
    counted = (
        keys.get("micro_batch_size"),
        keys.get("gradient_accumulation_steps"),
        keys.get("dp_shard_size"),
        keys.get("dp_replicate_size", 1),
    )
    whole = [one for one in counted if isinstance(one, int)]
    if len(whole) == len(counted):
        values["batching.global_batch_size"] = math.prod(whole)
    return values


TARGET = Target(
    "axolotl",
    "axolotl",
    "0.19.0",
    (*MODEL, *DATA, *LAYOUT, *REST),
    render,
    FIXED,
    LIMITS,
    NOT_CARRIED,
    (refused_together,),
    complete,
)
