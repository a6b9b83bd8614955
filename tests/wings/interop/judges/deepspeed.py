"""What DeepSpeed's own parser reads in configurations: cases on stdin, judgements on the last line of stdout."""

import json
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

from deepspeed.runtime import config as module

module.dist.get_rank = lambda: 0  # no job is running

SECTIONS = {
    "zero_optimization": "zero_config",
    "bf16": "bfloat16_config",
    "fp16": "float16_config",
    "activation_checkpointing": "activation_checkpointing_config",
    "tensor_parallel": "tensor_parallel_config",
    "optimizer.params": "optimizer_params",
    "scheduler.params": "scheduler_params",
}
NAMES = {
    "optimizer.type": "optimizer_name",
    "scheduler.type": "scheduler_name",
    "data_types.grad_accum_dtype": "grad_accum_dtype",
}


class Ranks:
    """Stand-in for the data-parallel ranks of a job."""

    def __init__(self, count):
        self.count = count

    def get_data_parallel_world_size(self):
        return self.count


def look_up(config, key):
    section = max((name for name in SECTIONS if key.startswith(f"{name}.")), key=len, default="")
    value = getattr(config, SECTIONS[section]) if section else config
    for part in [NAMES[key]] if key in NAMES else key[len(section) :].strip(".").split("."):
        name, _, index = part.partition("[")
        value = value[name] if isinstance(value, dict) else getattr(value, name)
        value = value[int(index[:-1])] if index else value
    return value if isinstance(value, (int, float, bool, type(None))) else str(value).rpartition(".")[2]


def judge(case):
    try:
        config = module.DeepSpeedConfig(json.loads(case["files"]["ds_config.json"]), mpu=Ranks(case["about"]["ranks"]))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    found = {}
    for key in case["keys"]:
        try:
            found[key] = look_up(config, key)
        except (AttributeError, KeyError, IndexError):
            continue
    return {"error": None, "keys": found}


print("\n" + json.dumps([judge(case) for case in json.load(sys.stdin)]))
