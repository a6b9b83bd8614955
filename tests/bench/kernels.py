"""Every kernel that runs here beside torch's default: forward and backward at shapes of real runs, one process.

    python tests/bench/kernels.py [recipe=quickstart key=value ...] [--again NUMBER]

Also those that `kernels=auto` passes over because they take more memory than a plan counts. Without arguments, small
runs of each family. Backends take turns; the figure is the median ratio over rounds, with its quartiles.
"""

from __future__ import annotations

import argparse
import sys

import torch
from rich.console import Console

from trainspec_cli.core.node import cpu_name
from trainspec_cli.engine.build.assemble import load_kernel
from trainspec_cli.engine.tools.kernels import calls_of, try_kernels, workloads_of
from trainspec_cli.recipe.keys.kernels import KERNELS, KernelTable
from trainspec_cli.recipe.rules.check import explain
from trainspec_cli.reporter.kernels_text import render_table
from trainspec_cli.run.tools import judge_operation
from trainspec_cli.session.recipe.load import load, plan_on, this_machine

RUNS = {
    "llama": ["recipe=quickstart", "optim.name=adamw", "data.seq_len=512"],
    "experts": ["recipe=tiny_moe", "model.hidden_size=256", "model.experts.expert_ffn_size=512", "data.seq_len=512"],
    "mamba2": ["recipe=tiny_mamba2", "model.hidden_size=256", "data.seq_len=512"],
}


def measure(arguments: list[str]) -> KernelTable:
    loaded = load([*arguments, "cluster.devices_per_node=1"])
    machine = this_machine(loaded.spec)
    assert machine is not None
    plan = plan_on(loaded, machine)
    calls, device = calls_of(plan, 0), torch.device(plan.device)
    figures = {}
    for op, workload in workloads_of(plan, calls, device).items():
        lacks = {name: explain(backend, on_gpu=plan.device == "cuda") for name, backend in KERNELS[op].items()}
        kernels = {name: load_kernel(op, name) for name, lack in lacks.items() if not lack}
        figures[op] = judge_operation([try_kernels(kernels, workload)])
    name = machine.gpu_names[0] if plan.device == "cuda" else cpu_name()
    return KernelTable(name, plan.compute, torch.__version__, {}, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--again", type=int, default=1, help="measure so many times")
    options = parser.parse_args()
    runs = {" ".join(options.arguments): options.arguments} if options.arguments else RUNS
    console = Console(width=140 if not sys.stdout.isatty() else None)
    for name, arguments in runs.items():
        for _ in range(options.again):
            console.print(f"\n{name}: {' '.join(arguments)}", style="bold")
            console.print(render_table(measure(arguments)))


if __name__ == "__main__":
    main()
