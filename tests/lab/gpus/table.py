"""What doctor, plan, validate and launch make of a recipe on a machine of the lab, in this process.

`PYTHONPATH=tests python -m lab.gpus.table [--machine NAME]... [--recipe NAME]... [--elastic]` prints the table:
machine, recipe, layout, predicted peak of memory, predicted step, and exit codes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lab.gpus.machines import play
from trainspec_cli.__main__ import run
from trainspec_cli.core.printable import GIB
from trainspec_cli.data.corpus.shards import SCHEMA, ShardManifest, ShardWriter, write_manifest

RECIPES = Path(__file__).parents[3] / "recipes"
SAMPLES = {"mri_unet3d": [], "resnet50": ["model.num_classes=8"]}
"""Recipes of images that nobody has here, and what phantoms need to stand in."""
NEEDS_MORE = ("finetune_chat", "plan_defaults")
"""Recipes that are not whole without a model or data of the user's."""
COMMANDS = (("plan", "--json"), ("validate", "--here", "--json"), ("launch", "--dry-run", "--json"))

ALIKE = (
    *("1xh100_sxm", "2xh100_sxm", "4xh100_sxm", "6xh100_sxm", "8xh100_sxm", "8xh100_pcie", "8xh200", "8xb200"),
    *("8xa100_40gb", "8xa100_80gb", "8xl40s", "2xrtx_3090", "8xrtx_3090", "4xrtx_4090", "2xrtx_5090", "8xa10g"),
    *("1xt4", "8xt4", "4xv100_16gb", "2xrtx_6000_ada", "4xrtx_a6000", "1xgb10", "2xrtx_3080", "2xunknown"),
    *("1xunheard_of", "1xgtx_1080_ti"),
)
ODD = (
    *("mig_a100", "mig_h100", "mig_by_uuid", "visible_by_index", "visible_by_uuid", "visible_none", "mixed"),
    *("mixed_memory", "busy", "nvlink_down", "old_driver", "old_nvml", "no_gpus", "no_library"),
    *("amd_mi300x", "amd_mi250x", "amd_visible", "amd_visible_rocr"),
)
UNUSABLE = (
    *("mig_without_slices", "visible_unknown_index", "visible_unknown_uuid", "visible_twice", "mismatched_driver"),
    *("no_permission", "lost", "lost_handle", "forbidden", "amd_visible_unknown"),
)
"""Machines whose GPUs cannot be used: a run on `device: auto` is refused."""


@dataclass(frozen=True)
class Cell:
    machine: str
    recipe: str
    elastic: bool
    arguments: list[str] = field(repr=False)
    command: str
    exit_code: int
    text: str = field(repr=False)
    shown: dict[str, Any] = field(repr=False)
    """The JSON of the command."""

    @property
    def codes(self) -> list[str]:
        """Codes of the problems that the command reported."""
        return [problem["code"] for problem in self.shown.get("problems", self.shown.get("errors", []))]

    @property
    def plan(self) -> dict[str, Any] | None:
        """What `launch` would start."""
        return self.shown.get("plan") if self.command == "launch" else None

    @property
    def devices(self) -> int:
        """The devices of the layout that `launch` would start."""
        assert self.plan is not None
        axes = (self.plan["layout"][axis] for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"))
        product = self.plan["replica_groups"]
        for size in axes:
            product *= size
        return int(product)

    @property
    def needed_bytes(self) -> float | None:
        prediction = self.plan and self.plan["prediction"]
        if not prediction:
            return None
        return float(sum((*prediction["memory"].values(), *prediction["beside"].values())))

    @property
    def step_s(self) -> float | None:
        prediction = self.plan and self.plan["prediction"]
        return float(sum(prediction["time_s"].values())) if prediction else None

    @property
    def layout(self) -> str:
        if self.plan is None:
            return ", ".join(self.codes)
        axes = {axis: self.plan["layout"][axis] for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")}
        groups = self.plan["replica_groups"]
        words = [f"{groups} groups"] * (groups > 1) + [f"{axis}={size}" for axis, size in axes.items() if size > 1]
        return f"{self.plan['device']}: {' '.join(words) or 'one process'}, {self.plan['compute']}"


def recipes() -> list[str]:
    names = (path.stem for path in sorted(RECIPES.glob("*.yaml")))
    return [name for name in names if name not in NEEDS_MORE]


def write_tokens(folder: Path) -> Path:
    """Write a folder of tokens that every text model can read."""
    folder.mkdir(parents=True)
    with ShardWriter(folder, "train", "uint16") as train:
        train.append([number % 256 for number in range(20_000)], text_bytes=20_000, documents=4)
    with ShardWriter(folder, "heldout", "uint16") as heldout:
        heldout.append([number % 256 for number in range(10_000)], text_bytes=10_000, documents=2)
    facts: dict[str, Any] = {"vocab_size": 256, "vocab_size_asked": 256, "end_of_document_id": 0}
    write_manifest(
        folder,
        ShardManifest(
            schema=SCHEMA,
            dtype="uint16",
            tokenizer_sha256="",
            source={},
            heldout_fraction=1 / 3,
            xz_bits_per_byte=None,
            train=train.finish(),
            heldout=heldout.finish(),
            **facts,
        ),
    )
    return folder


def arguments_of(recipe: str, tokens: Path, *, elastic: bool) -> list[str]:
    """Return the recipe on this machine alone, with data that is here."""
    text = (RECIPES / f"{recipe}.yaml").read_text()
    given = [f"recipe={recipe}", "cluster=auto", "cluster.num_nodes=1"]
    if recipe in SAMPLES:
        given += ["data=phantom", "data.path=null", *SAMPLES[recipe]]
    elif "data/" in text:
        given.append(f"data.path={tokens}")
    if elastic:
        given.append("resilience=elastic")
    return given


def call(arguments: list[str]) -> tuple[int, str, dict[str, Any]]:
    """Run a command in this process -> exit code, all that it printed, and its JSON."""
    out = io.StringIO()
    said = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        code = run(arguments)
    try:
        shown = json.loads(out.getvalue())
    except ValueError:
        shown = {}
    return code, out.getvalue() + said.getvalue(), shown if isinstance(shown, dict) else {"problems": shown}


def walk(
    machine: str, recipe: str, tokens: Path, *, elastic: bool = False, only: Collection[str] = ()
) -> Iterator[Cell]:
    """Give the recipe to each command (or those of `only`) on the machine, which must be played already."""
    given = arguments_of(recipe, tokens, elastic=elastic)
    for name, *options in (command for command in COMMANDS if not only or command[0] in only):
        yield Cell(machine, recipe, elastic, given, name, *call([name, *given, *options]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", action="append")
    parser.add_argument("--recipe", action="append")
    parser.add_argument("--elastic", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokens = write_tokens(Path(folder) / "tokens")
        print("| machine | recipe | layout | memory GiB | step | plan | validate | launch |")
        print("|---|---|---|---|---|---|---|---|")
        for machine in asked.machine or (*ALIKE, *ODD, *UNUSABLE):
            for recipe in asked.recipe or recipes():
                with pytest.MonkeyPatch.context() as patch:
                    play(machine, patch)
                    cells = list(walk(machine, recipe, tokens, elastic=asked.elastic))
                launch = cells[-1]
                memory = f"{launch.needed_bytes / GIB:.1f}" if launch.needed_bytes else ""
                step = f"{launch.step_s:.3g} s" if launch.step_s else ""
                codes = " | ".join(str(cell.exit_code) for cell in cells)
                print(f"| {machine} | {recipe} | {launch.layout} | {memory} | {step} | {codes} |", flush=True)


if __name__ == "__main__":
    main()
