"""What torchtitan's own parser reads in modules: cases on stdin, judgements on the last line of stdout."""

import importlib
import json
import sys
import tempfile
from pathlib import Path

from torchtitan.config import ConfigManager

OPTIMIZER = "optimizer."


def look_up(config, key):
    if key.startswith(OPTIMIZER):
        (group,) = config.optimizer.param_groups
        value = group.optimizer_kwargs
        key = key.removeprefix(OPTIMIZER)
    else:
        value = config
    for part in key.split("."):
        name, _, index = part.partition("[")
        value = value[name] if isinstance(value, dict) else getattr(value, name)
        value = value[int(index[:-1])] if index else value
    return value


def sizes_of(config):
    model = config.model_spec.model
    return [len(model.layers), model.dim, model.vocab_size]


def judge(case, number):
    folder = Path(tempfile.mkdtemp())
    (folder / f"case_{number}.py").write_text(case["files"]["trainspec_run.py"])
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        arguments = ["--module", f"case_{number}", "--config", "trainspec_run"]
        config = ConfigManager().parse_args(arguments)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    except SystemExit as error:
        return {"error": f"exit {error.code}"}
    found = {key: look_up(config, key) for key in case["keys"]}
    recompute = config.activation_checkpoint
    found["activation_checkpoint"] = type(recompute).__qualname__ if recompute else None
    found["sizes"] = sizes_of(config)
    return {"error": None, "keys": found}


print("\n" + json.dumps([judge(case, number) for number, case in enumerate(json.load(sys.stdin))]))
