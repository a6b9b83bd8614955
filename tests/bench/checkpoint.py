"""What checkpoints cost training, at once (`checkpoint.mode=sync`) and beside it (`async`).

    python tests/bench/checkpoint.py [key=value ...]

Runs the same recipe in both ways and without checkpoints, in turn, and prints how long a save holds training up, how
long it takes to be whole, and what it adds to a run: for the async way, also what its writing takes from the steps
beside it. Figures hold for an idle machine; the rounds' medians are shown.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from trainspec_cli.core.printable import format_bytes, format_duration
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

ROUNDS = 2
WAYS = {
    "none": (),
    "sync": ("checkpoint.interval_steps=10", "checkpoint.mode=sync"),
    "async": ("checkpoint.interval_steps=10", "checkpoint.mode=async"),
}
RECIPE = (  # 27M parameters
    *("recipe=quickstart", "train.max_steps=44", "train.eval_interval_steps=null", "sample.max_new_tokens=0"),
    *(
        "model.num_layers=8",
        "model.hidden_size=512",
        "model.num_heads=8",
        "model.num_kv_heads=8",
        "model.ffn_size=1408",
        "model.head_dim=64",
        "optim.name=adamw",
    ),
)


def main() -> None:
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            for way, settings in WAYS.items():
                found[way].append(measure(Path(folder) / f"{way}{number}", settings))
                print(way, found[way][-1], flush=True)
    figures = {way: {key: median(run[key] for run in runs) for key in runs[0]} for way, runs in found.items()}
    for way, of in figures.items():
        saves = f"held up {format_duration(of['blocked_s'])}, whole after {format_duration(of['written_s'])}, "
        print(
            f"{way:6} {saves if of['saves'] else ''}{format_duration(of['step_s'])} per step; "
            f"{format_duration(of['steps_s'])} in all"
        )
    ratio = figures["async"]["blocked_s"] / figures["sync"]["blocked_s"]
    print(f"{format_bytes(figures['sync']['bytes'])} a checkpoint; async holds training up for {ratio:.1%} of sync")
    for way in ("sync", "async"):
        cost_s = (figures[way]["steps_s"] - figures["none"]["steps_s"]) / figures[way]["saves"]
        print(
            f"{way:6} a checkpoint adds {format_duration(max(0.0, cost_s))} to the run, its drag on the steps included"
        )


def measure(root: Path, settings: tuple[str, ...]) -> dict[str, float]:
    """One run's figures, from rank 0's events: without the first steps, and without the first save, which allocates."""
    command = (sys.executable, "-m", "trainspec_cli", "launch", *RECIPE, *settings, *sys.argv[1:], f"run.dir={root}")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    events = list(read_events(RunDir(root).events(0)))
    steps = [event for event in events if event["type"] == "step" and event["step"] > 14]
    saves: list[dict[str, Any]] = [
        e for e in events if e["type"] == "checkpoint" and 10 < e["step"] < steps[-1]["step"]
    ]
    return {
        "saves": len(saves),
        "blocked_s": median([save["seconds"] for save in saves] or [0.0]),
        "written_s": median([save["written_s"] for save in saves] or [0.0]),
        "bytes": max([save["bytes"] for save in saves] or [0]),
        "step_s": median(step["step_time_s"] for step in steps),
        "steps_s": sum(step["step_time_s"] for step in steps),
    }


if __name__ == "__main__":
    main()
