"""The entry point of each tool process: `python -m trainspec_cli.engine.tools NAME FOLDER`, directly or under torchrun.

FOLDER/request.json is the request for module NAME in this folder. The type annotations of its function `run` determine
how the request is read; the result of the first process is written to FOLDER/tool_result.json.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import torch.distributed as dist

from trainspec_cli.engine.comm.joining import leave_processes
from trainspec_cli.recipe.records import from_plain, to_plain
from trainspec_cli.recipe.results.tools import REQUEST, RESULT
from trainspec_cli.run.folder.files import read_json, write_json


def main(package: str = "trainspec_cli.engine.tools") -> None:
    """Run the tool named on the command line, which is a module in `package`."""
    name = sys.argv[1]
    folder = Path(sys.argv[2])
    run = import_module(f"{package}.{name}").run
    result = run(from_plain(get_type_hints(run)["request"], read_json(folder / REQUEST)))
    if os.environ.get("RANK", "0") == "0":
        write_json(folder / RESULT, to_plain(result))
    if dist.is_initialized():
        dist.barrier()
        leave_processes()


if __name__ == "__main__":
    main()
