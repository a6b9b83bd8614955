"""How long a live change of layout holds a run up, and what memory it takes.

    python tests/bench/relayout.py [key=value ...]

Runs a model of some 30 million parameters through a cycle of layouts, and prints for each change the pause beside the
steps around it, how long the first step after it takes, what went from rank to rank, and the most of the state that a
process held meanwhile. The target is a pause of at most two steps' time and two seconds.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from trainspec_cli.core.printable import format_bytes, format_duration
from trainspec_cli.reporter.changes import describe_directive
from trainspec_cli.run.folder.event_types.events import DirectiveEvent
from trainspec_cli.run.folder.events import read_events, read_log
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan

EVERY_STEPS = 6
LAYOUTS = (
    "pp: 2, dp_shard: 1",
    "pp: 2, dp_shard: 1, stage_layers: [5, 3]",
    "tp: 2, dp_shard: 1",
    "dp_shard: 2, zero_stage: 1",
    "dp_shard: 2, zero_stage: 3",
)
RECIPE = (
    *(
        "recipe=quickstart",
        "optim.schedule.kind=constant",
        "optim.schedule.warmup_steps=2",
        "layout=fsdp",
        "cluster.devices_per_node=2",
        "precision=fp32",
        "sample.max_new_tokens=0",
    ),
    *("train.eval_interval_steps=null", "checkpoint.interval_steps=null", "scheduler=off", "model.num_layers=8"),
    *("model.hidden_size=512", "model.num_heads=8", "model.num_kv_heads=8", "model.head_dim=64"),
    *("model.ffn_size=1408", "optim.name=adamw"),
)
ADAMW_BYTES = 12
"""Of a parameter and its two moments in fp32."""


def main() -> None:
    steps = [EVERY_STEPS * place for place in range(1, len(LAYOUTS) + 1)]
    changes = ", ".join(f"{{step: {step}, {layout}}}" for step, layout in zip(steps, LAYOUTS, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder) / "run")
        settings = (f"scheduler.changes=[{changes}]", f"train.max_steps={steps[-1] + EVERY_STEPS}", *sys.argv[1:])
        command = (sys.executable, "-m", "trainspec_cli", "launch", *RECIPE, *settings, f"run.dir={run.root}")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        state_bytes = ADAMW_BYTES * read_plan(run).params
        took_s = {
            event["step"]: event["step_time_s"] for event in read_events(run.events(0)) if event["type"] == "step"
        }
        print(f"the whole state is {format_bytes(state_bytes)}")
        for event in read_log(run.directives):
            assert isinstance(event, DirectiveEvent)
            print(describe_directive(event).line)
            usual_s = median(took_s[event.step + near] for near in range(1 - EVERY_STEPS, EVERY_STEPS + 1))
            after_s = median(took_s[event.step + near] for near in range(2, EVERY_STEPS + 1))
            limit_s = 2 * usual_s + 2
            pause_s, peak_bytes = event.pause_s or 0.0, event.peak_bytes or 0
            print(
                f"  {format_duration(pause_s)} beside {format_duration(usual_s)} per step: "
                f"{'within' if pause_s <= limit_s else 'OVER'} {format_duration(limit_s)}; "
                f"the first step takes {took_s[event.step + 1] / after_s:.2f} times as long as those after it; "
                f"peak {peak_bytes / state_bytes:.0%} of the whole state"
            )


if __name__ == "__main__":
    main()
