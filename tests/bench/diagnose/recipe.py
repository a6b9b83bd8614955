"""The run that a case disturbs: a tiny llama whose passes sleep, on ranks of one to three nodes."""

from __future__ import annotations

import json
import random
from pathlib import Path

from .cases import SAMPLES, Case

ENDLESS = 1_000_000
LAYERS = 4
DOCUMENTS = 4000
LONG_WORDS, SHORT_WORDS, LONG_SHARE = 400, 8, 0.02
"""One document in fifty is fifty times as long as the others: half of all words are theirs."""
CHECKPOINT_STEPS = 4


def arguments(case: Case, data: Path) -> list[str]:
    """Return what `trainspec launch` is given, but for its folder and its node."""
    given = [
        *("recipe=tiny", "run.preflight=false", "precision=fp32", f"train.max_steps={ENDLESS}"),
        *("layout=fsdp", "layout.zero_stage=1", f"layout.pp={case.stages}"),
        f"model.num_layers={LAYERS}",
        f"cluster.devices_per_node={case.ranks_per_node}",
        f"batching.global_batch_size={SAMPLES * case.ranks}",
        f"fault={_steady_work(case)}",
    ]
    for injection in case.injections:
        if injection.mechanism == "stage":
            layers = [1] * case.stages
            layers[injection.stage or 0] = LAYERS - sum(layers) + 1
            given += [f"layout.stage_layers={layers}".replace(" ", "")]
        if injection.mechanism == "slow_disk":
            given += [f"checkpoint.interval_steps={CHECKPOINT_STEPS}", "checkpoint.mode=sync"]
        if injection.mechanism == "lengths":
            given += ["data=jsonl", f"data.path={data}", "data.document_masks=true", "data.seq_len=256"]
    return given


def _steady_work(case: Case) -> str:
    """All ranks compute equally long: a rank of a pipeline has the samples of all its stages' ranks."""
    sample_s = case.step_s / SAMPLES
    faults = (f"throttle(step=0,rank={rank},seconds={sample_s},steps={ENDLESS})" for rank in range(case.ranks))
    return ";".join(faults)


def write_documents(path: Path, seed: int) -> None:
    """Write documents of very uneven lengths, one a line."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(DOCUMENTS):
            words = LONG_WORDS if draw.random() < LONG_SHARE else SHORT_WORDS
            file.write(json.dumps({"text": " ".join(f"word{draw.randrange(99)}" for _ in range(words))}) + "\n")
