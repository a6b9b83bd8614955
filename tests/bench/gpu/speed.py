"""Tokens a second and MFU on the GPU at hand: this engine beside a plain Hugging Face loop and torchtitan.

    pip install -e '.[bench]' && python -m tests.bench.gpu.speed [--only dense_1b,moe] [--rounds 3] [--json FILE]

Models: dense ones, some layers as wide as an 8B model's, a mixture of experts, Mamba-2 and a U-Net. Each contender
trains the same model on the same samples in bf16 (or fp8) with fused AdamW and clipping, in a process of its own, and
they take turns: round 1 of each, round 2 of each, ... The first steps (compilation, allocation) are left out. MFU is
against the dense bf16 peak of the catalogue (989 TFLOP/s for an H200). What fails is shown with its reason.

`--device cpu --tiny` runs it through where there is no GPU: its figures say nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from .contenders import CONTENDERS, WARMUP_STEPS, is_installed, run_contender
from .workloads import WORKLOADS, Workload

TINY_CONTENDERS = ("trainspec-eager", "hf-eager")
Figures = dict[str, dict[str, list[float | str]]]
"""Workload -> contender -> a round's tokens/s each, or why there is none."""


def main() -> None:
    options = parse_arguments()
    if options.one:
        workload, contender, tokens = options.one
        seconds = run_contender(contender, chosen(options)[workload], tokens, options.steps, options.device)
        print(json.dumps({"step_s": seconds}))
        return
    if options.device == "cuda" and not has_gpu():
        sys.exit("there is no GPU here, and this bench measures on one; --device cpu --tiny runs it through")
    facts = facts_of(options.device)
    found = measure_rounds(options)
    show(found, chosen(options), facts)
    if options.json:
        told = {**facts, "batch": {name: w.batch_size for name, w in chosen(options).items()}, "tokens_per_s": found}
        options.json.write_text(json.dumps(told, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", help=f"of {','.join(WORKLOADS)}")
    parser.add_argument("--contenders", help=f"of {','.join(CONTENDERS)}")
    parser.add_argument("--batch-size", type=int, help="samples per step, in one go; each model has its own")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models that take seconds, eager, one round: a check")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--one", nargs=3, metavar=("WORKLOAD", "CONTENDER", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.rounds, options.steps = 1, WARMUP_STEPS + 2
    return options


def chosen(options: argparse.Namespace) -> dict[str, Workload]:
    names = options.only.split(",") if options.only else list(WORKLOADS)
    found = {name: WORKLOADS[name].shrunk() if options.tiny else WORKLOADS[name] for name in names}
    if options.batch_size:
        found = {name: workload.with_batch(options.batch_size) for name, workload in found.items()}
    return found


def contenders(options: argparse.Namespace, workload: Workload) -> list[str]:
    if options.contenders:
        return list(options.contenders.split(","))
    wanted = TINY_CONTENDERS if options.tiny else CONTENDERS
    return [name for name in wanted if is_installed(name) and CONTENDERS[name].serves(workload)]


# Measuring


def measure_rounds(options: argparse.Namespace) -> Figures:
    found: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, workload in chosen(options).items():
            tokens = write_tokens(Path(folder) / f"{name}_train.bin", workload, options.steps)
            found[name] = {contender: [] for contender in contenders(options, workload)}
            for turn in range(options.rounds):
                for contender, figures in found[name].items():
                    figures.append(
                        measure(name, contender, workload, tokens, options.steps, options.device, options.tiny)
                    )
                    print(f"round {turn + 1}: {name:16} {contender:16} {shown(figures[-1])}", flush=True)
    return found


def write_tokens(file: Path, workload: Workload, steps: int) -> Path:
    """Ids drawn at random, as nanoGPT keeps them: some more than all steps read, for what is held out."""
    if workload.is_unet:
        return file
    count = 2 * steps * workload.units_a_step + 1
    highest = min(workload.model.vocab_size, 2**16)
    np.random.default_rng(0).integers(highest, size=count).astype(np.uint16).tofile(file)
    return file


def measure(
    name: str, contender: str, workload: Workload, tokens: Path, steps: int, device: str, tiny: bool
) -> float | str:
    """Tokens (of a U-Net volumes) a second of one round, or the last that the process said."""
    command = [sys.executable, "-m", "tests.bench.gpu.speed", "--one", name, contender, str(tokens), "--device", device]
    command += ["--steps", str(steps), "--batch-size", str(workload.batch_size)]
    ended = subprocess.run(command + ["--tiny"] * tiny, capture_output=True, text=True)
    if ended.returncode:
        said = (ended.stderr or ended.stdout).strip().splitlines() or ["no word"]
        return next((line for line in reversed(said) if "Error" in line or "error" in line), said[-1])[:400]
    step_s = json.loads(ended.stdout.strip().splitlines()[-1])["step_s"]
    return float(workload.units_a_step / step_s)


# Where and with what


def has_gpu() -> bool:
    import torch

    return torch.accelerator.is_available()


def facts_of(device: str) -> dict[str, Any]:
    import torch

    from trainspec_cli.engine.observe.counters import device_name, measure_peak
    from trainspec_cli.planner.hardware.rates import find_accelerator

    where = torch.device(device)
    name = device_name(where)
    chip = find_accelerator(name) if device == "cuda" else None
    if chip:
        peak, source = chip.bf16_tflops * 1e12, f"dense bf16 peak from the data sheet of {chip.name}"
    else:
        peak, source = (measured := measure_peak(where, torch.bfloat16)).flops, measured.source
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "device": name,
        "peak_flops": peak,
        "peak_source": source,
        "cuda": torch.version.cuda,
        "versions": {package: version(package) for package in ("trainspec", "torch", "transformers", "torchtitan")},
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# Showing


def show(found: Figures, workloads: dict[str, Workload], facts: dict[str, Any]) -> None:
    versions = ", ".join(f"{package} {number}" for package, number in facts["versions"].items() if number)
    print(f"\n{facts['date']}, {facts['device']}, {versions}, CUDA {facts['cuda']}")
    print(f"MFU against {facts['peak_flops'] / 1e12:,.4g} TFLOP/s, the {facts['peak_source']}")
    for name, by_contender in found.items():
        show_workload(workloads[name], by_contender, facts["peak_flops"])


def show_workload(workload: Workload, found: dict[str, list[float | str]], peak_flops: float) -> None:
    measured = {name: [f for f in figures if isinstance(f, float)] for name, figures in found.items()}
    whole = {name: figures for name, figures in measured.items() if len(figures) == len(found[name])}
    peers = [name for name in whole if not name.startswith("trainspec")]
    peer = max(peers, key=lambda name: statistics.median(whole[name]), default=None)
    print(f"\n{workload.describe()}")
    print(f"{'contender':16} {'tokens/s':>10} {'spread':>17} {'MFU':>7}  ratio to the best peer")
    for name, figures in found.items():
        if name not in whole:
            print(f"{name:16} failed: {next(f for f in figures if isinstance(f, str))}")
            continue
        rates = whole[name]
        median = statistics.median(rates)
        ratio = ratios(rates, whole[peer]) if peer else ""
        mfu = median * workload.flops_per_token / peak_flops
        print(f"{name:16} {median:10,.0f} {min(rates):8,.0f}-{max(rates):<8,.0f} {mfu:7.1%}  {ratio}")


def ratios(rates: list[float], peers: list[float]) -> str:
    """Round by round: median (least-greatest)."""
    found = [own / peer for own, peer in zip(rates, peers, strict=True)]
    return f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})"


def shown(figure: float | str) -> str:
    return f"{figure:12,.0f} tokens/s" if isinstance(figure, float) else f"failed: {figure}"


if __name__ == "__main__":
    main()
