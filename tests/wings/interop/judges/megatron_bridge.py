"""What Megatron-Bridge's own checks read in modules: cases on stdin, judgements on the last line of stdout.

Each case is checked in the environment of its script, with stand-ins for a Hopper GPU and for packages of kernels and
multimodal data that the checks do not call.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import io
import json
import os
import runpy
import sys
import tempfile
import types
import typing
from pathlib import Path

import torch
import typing_extensions

if not hasattr(typing, "override"):
    typing.override = typing_extensions.override


class AbsentClass(type):
    """A class that has every attribute."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentClass(name, (), {})


class AbsentModule(types.ModuleType):
    __version__ = "2.9.0"
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return importlib.import_module(f"{self.__name__}.{name}") if name[0].islower() else AbsentClass(name, (), {})


class Absent:
    """Finds stand-ins for missing packages and their modules."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        absent = any(name == one or name.startswith(f"{one}.") for one in self.names)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec):
        return AbsentModule(spec.name)

    def exec_module(self, module):
        pass


STOOD_IN = ("transformer_engine", "datasets", "megatron.energon")
sys.meta_path.insert(0, Absent([name for name in STOOD_IN if not importlib.util.find_spec(name)]))
HOPPER = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, name="H100")
torch.cuda.get_device_properties = lambda *_: HOPPER
torch.cuda.get_device_capability = lambda *_: (9, 0)

with contextlib.redirect_stdout(io.StringIO()):
    from megatron.bridge.training.config import runtime_config_update
CLEAN = dict(os.environ)


def plain(value):
    value = value.__name__ if callable(value) else value
    return value if isinstance(value, (int, float, str, bool, list, type(None))) else str(value)


def judge(case):
    os.environ.clear()
    os.environ.update({**CLEAN, **case["about"]["environment"]})
    os.environ.update({"WORLD_SIZE": str(case["world_size"]), "RANK": "0"})
    file = Path(tempfile.mkdtemp()) / "trainspec_bridge.py"
    file.write_text(case["files"]["trainspec_bridge.py"])
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            config = runpy.run_path(str(file))["trainspec_run"]()
            runtime_config_update(config)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    found = {}
    for key in case["keys"]:
        section, _, name = key.partition(".")
        found[key] = plain(getattr(getattr(config, section), name, None))
    return {"error": None, "keys": {**found, "data_parallel_size": config.data_parallel_size}}


print("\n" + json.dumps([judge(case) for case in json.load(sys.stdin)], default=str))
