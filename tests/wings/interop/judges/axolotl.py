"""What axolotl's own parser reads in YAML files: cases on stdin, judgements on the last line of stdout.

Each case is read as if for Hopper GPUs, with a stand-in for the kernels that need them.
"""

import contextlib
import enum
import io
import json
import os
import sys
import types

import yaml

sys.modules["ring_flash_attn"] = types.ModuleType("ring_flash_attn")  # kernels that are imported but not called
os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"

from axolotl.utils import config as module  # noqa: E402 - after the stand-in
from axolotl.utils.dict import DictDefault  # noqa: E402
from axolotl.utils.distributed import _get_parallel_config_kwargs  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

module.load_model_config = lambda _: LlamaConfig()  # no checkpoint is read
CLEAN = dict(os.environ)
AXES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")


def look_up(config, key):
    value = config
    for part in key.split("."):
        name, _, index = part.partition("[")
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
        value = value[int(index[:-1])] if index and value else value
    value = value.value if isinstance(value, enum.Enum) else value
    return value if isinstance(value, (int, float, str, bool, list, type(None))) else str(value)


def axes_of(config, world_size):
    """Return the sizes of the mesh that axolotl builds."""
    sizes = (config.tensor_parallel_size, config.context_parallel_size, config.dp_shard_size, config.dp_replicate_size)
    mesh = _get_parallel_config_kwargs(world_size, *sizes, bool(config.fsdp_config))
    return [mesh.get(axis, 1) for axis in AXES]


def judge(case):
    os.environ.clear()
    os.environ.update({**CLEAN, "WORLD_SIZE": str(case["world_size"])})
    gpus = {"bf16": True, "fp8": True, "tf32": True, "n_gpu": 8, "n_node": 2, "compute_capability": "sm_90"}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            read = DictDefault(yaml.safe_load(case["files"]["axolotl.yml"]))
            config = module.validate_config(read, capabilities=gpus, env_capabilities={"torch_version": "2.13.0"})
            found = {key: look_up(config, key) for key in case["keys"]}
            axes = axes_of(config, case["world_size"])
            module.normalize_config(config)
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None, "keys": {**found, "batch_size": config.batch_size, "axes": axes}}


print("\n" + json.dumps([judge(case) for case in json.load(sys.stdin)], default=str))
