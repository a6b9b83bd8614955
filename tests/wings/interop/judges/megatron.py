"""What Megatron-LM's own parser reads in command lines: cases on stdin, judgements on the last line of stdout.

Each case is read in the environment of its script, with a stand-in for a Hopper GPU.
"""

import contextlib
import io
import json
import os
import sys
import types
import typing

import torch
import typing_extensions

if not hasattr(typing, "override"):
    typing.override = typing_extensions.override
HOPPER = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=80 << 30)
torch.cuda.get_device_properties = lambda *_: HOPPER
torch.cuda.get_device_capability = lambda *_: (9, 0)

from megatron.training.argument_utils import core_transformer_config_from_args  # noqa: E402 - after the stand-in for the GPU
from megatron.training.arguments import parse_args, validate_args  # noqa: E402

CLEAN = dict(os.environ)
WITHOUT_TRANSFORMER_ENGINE = ["--no-rope-fusion"]
DESTINATIONS = {
    "--norm-epsilon": "layernorm_epsilon",
    "--untie-embeddings-and-output-weights": "untie_embeddings_and_output_weights",
    "--disable-bias-linear": "add_bias_linear",
}


def judge(case):
    os.environ.clear()
    os.environ.update(CLEAN)
    os.environ.update(case["about"]["environment"])
    os.environ.update({"WORLD_SIZE": str(case["world_size"]), "RANK": "0"})
    sys.argv = ["pretrain_gpt.py", *case["about"]["words"], *WITHOUT_TRANSFORMER_ENGINE]
    try:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            arguments = parse_args()
            validate_args(arguments)
            core_transformer_config_from_args(arguments)
    except SystemExit:
        return {"error": printed.getvalue()[-400:]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    found = {}
    for key in case["keys"]:
        name = DESTINATIONS.get(key, key.strip("-").replace("-", "_"))
        value = getattr(arguments, name, None)
        found[key] = value if isinstance(value, (int, float, str, bool, list, type(None))) else str(value)
    return {"error": None, "keys": found}


print("\n" + json.dumps([judge(case) for case in json.load(sys.stdin)], default=str))
