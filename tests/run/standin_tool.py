"""A tool's program for tests: `standin_tool.py MODE NAME FOLDER`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    mode, _, folder = sys.argv[1:]
    request = json.loads(Path(folder, "request.json").read_text())
    if mode == "answer":
        result = {"torch": request["compute"], "cuda": None, "nccl": None, "devices": 2, "slowest_device": 1}
        result |= {"matmul_flops": 1e12, "memory_bytes_per_s": float(Path(folder).stat().st_mode & 0o777)}
        if os.environ.get("RANK", "0") == "0":
            Path(folder, "tool_result.json").write_text(json.dumps(result))
    elif mode == "other":
        Path(folder, "tool_result.json").write_text('{"colour": "red"}')
    elif mode == "fail":
        for number in range(100):
            print(f"line {number}", file=sys.stderr)
        raise ValueError("the chip is warm")
    elif mode == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(os.environ["STARTED"]).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)


if __name__ == "__main__":
    main()
