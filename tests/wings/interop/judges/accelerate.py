"""Accelerate's YAML: the environment that `accelerate launch` sets, and the values that a process reads from it."""

import json
import os
import sys
import tempfile
from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env

MESH = "parallelism_config.parallelism_config_"
PLUGIN = {
    "fsdp_config.fsdp_version": lambda plugin: plugin.fsdp_version,
    "fsdp_config.fsdp_reshard_after_forward": lambda plugin: plugin.reshard_after_forward,
    "fsdp_config.fsdp_activation_checkpointing": lambda plugin: plugin.activation_checkpointing,
    "fsdp_config.fsdp_state_dict_type": lambda plugin: plugin.state_dict_type.name,
    "fsdp_config.fsdp_offload_params": lambda plugin: type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
}
ENVIRONMENT = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "dynamo_config.dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
    "dynamo_config.dynamo_use_regional_compilation": "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
    "fsdp_config.fsdp_auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
}
ARGUMENTS = {"num_machines", "num_processes", "use_cpu", "rdzv_backend"}
CLEAN = dict(os.environ)


def judge(case):
    os.environ.clear()
    os.environ.update(CLEAN)
    file = Path(tempfile.mkdtemp()) / "accelerate.yaml"
    file.write_text(case["files"]["accelerate.yaml"])
    where = ["--machine_rank", "0", "--main_process_ip", "127.0.0.1", "--main_process_port", "29511"]
    try:
        given = launch_command_parser().parse_args(["--config_file", str(file), *where, "train.py"])
        arguments = _validate_launch_command(given)[0]
        os.environ.update(prepare_multi_gpu_env(arguments))
        mesh = ParallelismConfig() if arguments.use_parallelism_config else None
        plugin = FullyShardedDataParallelPlugin() if arguments.use_fsdp else None
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    found = {}
    for key in case["keys"]:
        if key.startswith(MESH):
            found[key] = getattr(mesh, key.removeprefix(MESH), None)
        elif key in PLUGIN:
            found[key] = PLUGIN[key](plugin) if plugin else None
        elif key in ENVIRONMENT:
            found[key] = os.environ.get(ENVIRONMENT[key])
        elif key in ARGUMENTS:
            found[key] = getattr(arguments, key, None)
        elif key == "distributed_type":
            found[key] = "FSDP" if arguments.use_fsdp else "MULTI_GPU" if arguments.multi_gpu else None
    return {"error": None, "keys": found}


print("\n" + json.dumps([judge(case) for case in json.load(sys.stdin)]))
