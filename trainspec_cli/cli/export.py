"""`trainspec export`: write a run's weights in another project's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trainspec_cli.cli.options import AsJson, RunArgument, check_new
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.printable import format_bytes
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.run.exporting import (
    Export,
    find_checkpoint,
    how_to_load,
    write_adapters,
    write_folder,
)
from trainspec_cli.session.runs.find import find_own_run


def export(
    run: RunArgument,
    output: Annotated[Path, typer.Option(help="Folder to make.")],
    format_: Annotated[
        Literal["hf", "peft", "dcp", "litgpt", "megatron"],
        typer.Option(
            "--format",
            help="hf: for from_pretrained, with LoRA merged; peft: only LoRA adapters; dcp: torch's distributed "
            "checkpoint; litgpt; megatron: megatron-core's distributed checkpoint.",
        ),
    ] = "hf",
    naming: Annotated[
        Literal["hf", "torchtitan"], typer.Option(help="Naming scheme of the tensors in a dcp checkpoint.")
    ] = "hf",
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"], typer.Option(help="Data type of the weights; the run trains in fp32.")
    ] = "fp32",
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; by default the newest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint with the lowest held-out loss.")] = False,
    max_file_gb: Annotated[float, typer.Option(help="Maximum size of a file; larger models are split.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Write a run's weights, config, tokenizer and generation config, which transformers loads without trainspec."""
    run_dir = find_own_run(run)
    chosen = find_checkpoint(run_dir, step, best=best)
    # Check this first, because reading the checkpoint may take minutes.
    check_new(output)
    if naming != "hf" and format_ != "dcp":
        message = f"--naming {naming} needs --format dcp, but the format is {format_}"
        raise RecipeError(Problem("usage", message, "--naming", "pass --format dcp, or leave --naming out"))
    wanted = Export(run_dir, chosen, dtype, round(max_file_gb * 1e9))
    if format_ == "peft":
        what = write_adapters(wanted, output)
    else:
        what = write_folder(wanted, output, format_, naming)
    files = sorted(output.glob(_WEIGHTS.get(format_, "*.safetensors")))
    size = sum(file.stat().st_size for file in files)
    if as_json:
        print(json_text({"path": str(output), "step": wanted.step, "what": what, "files": len(files), "bytes": size}))
        return
    print(f"{output}: {what} of step {wanted.step}, {format_bytes(size)} in {len(files)} file{'s'[: len(files) > 1]}")
    print("\n".join(how_to_load(output, format_)))


_WEIGHTS = {"dcp": "*.distcp", "megatron": "*.distcp", "litgpt": "*.pth"}
