"""What MaxText's own parser reads in YAML files: cases on stdin, judgements on the last line of stdout."""

import contextlib
import enum
import io
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

from maxtext.configs.pyconfig import initialize_pydantic

ALONE = ["skip_jax_distributed_system=true"]


def judge(case):
    file = Path(tempfile.mkdtemp()) / "maxtext.yml"
    file.write_text(case["files"]["maxtext.yml"])
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            config = initialize_pydantic(["", str(file), *ALONE])
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error} {printed.getvalue()[-400:]}"}
    found = {}
    for key in case["keys"]:
        value = getattr(config, key, None)
        value = value.value if isinstance(value, enum.Enum) else value
        found[key] = value if isinstance(value, (int, float, str, bool, list, type(None))) else str(value)
    return {"error": None, "keys": found}


print("\n" + json.dumps([judge(case) for case in json.load(sys.stdin)]))
