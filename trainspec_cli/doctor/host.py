"""`python -m trainspec_cli.doctor.host FOLDER cpu|cuda bf16|fp32`: this host's report, one line of JSON."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainspec_cli.doctor.checks import Check, check_host
from trainspec_cli.launch.job.environment import own_modules
from trainspec_cli.spec.json_text import json_text

SPEED = ("-m", "trainspec_cli.engine.tools.speed")
SPEED_TIMEOUT_S = 120.0


def main() -> None:
    folder, device, compute = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    print(json_text(examine_host(folder, device, compute), indent=None))


def examine_host(folder: Path, device: str, compute: str) -> dict[str, Any]:
    """`checks`, and `speed`: figures that hosts are compared by."""
    checks, speed = check_host(folder, device), measure_speed(device, compute)
    if "error" in speed:
        checks.append(Check("speed", "fail", str(speed.pop("error")), "run python -c 'import torch' on that host"))
    return {
        "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "time": time.time(),
        "checks": [asdict(check) for check in checks],
        "speed": speed,
    }


def measure_speed(device: str, compute: str) -> dict[str, Any]:
    """In a process of its own, since only the engine imports torch; `error` where it failed."""
    try:
        done = subprocess.run(
            [sys.executable, *SPEED, device, compute],
            env=os.environ | own_modules(),
            capture_output=True,
            text=True,
            timeout=SPEED_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"the devices did not answer within {SPEED_TIMEOUT_S:g} s"}
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or ["torch failed"])[-1]}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


if __name__ == "__main__":
    main()
