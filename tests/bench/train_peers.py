"""Tokens a second of one 30M-parameter llama: this engine beside Hugging Face's Trainer and a plain loop.

    pip install -e '.[bench]' && python tests/bench/train_peers.py [--rounds 5] [--steps 12]

Every contender trains the same model on the same samples in the same order of batch sizes, in bf16 with fused AdamW
and clipping, in a process of its own, and they take turns: round 1 of each, round 2 of each, ... Each family runs
eager and compiled, and its better setting counts. The first steps (compilation, allocation) are left out; a round's
figure is the median step. Printed: tokens/s (median over rounds, and the spread), and the ratio to the best peer,
taken round by round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SEQ_LEN, BATCH_SIZE, WARMUP_STEPS = 512, 8, 3
MODEL = {
    "num_layers": 10,
    "hidden_size": 384,
    "num_heads": 6,
    "num_kv_heads": 6,
    "head_dim": 64,
    "ffn_size": 1024,
    "vocab_size": 16384,
}
CONTENDERS = ("trainspec", "trainspec-compile", "trainer", "trainer-compile", "loop", "loop-compile")


def hugging_face_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=MODEL["vocab_size"],
        hidden_size=MODEL["hidden_size"],
        intermediate_size=MODEL["ffn_size"],
        num_hidden_layers=MODEL["num_layers"],
        num_attention_heads=MODEL["num_heads"],
        num_key_value_heads=MODEL["num_kv_heads"],
        head_dim=MODEL["head_dim"],
        max_position_embeddings=SEQ_LEN,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def samples(token_dir: str, count: int):
    import torch

    from trainspec_cli.data.corpus.shards import TokenFolder

    folder = TokenFolder.open(token_dir)
    return [torch.from_numpy(folder.tokens("train", i * SEQ_LEN, SEQ_LEN)) for i in range(count)]


def run_loop(token_dir: str, steps: int, compiled: bool) -> list[float]:
    """Seconds of each step of a plain loop over transformers' LlamaForCausalLM."""
    import torch

    model = hugging_face_model()
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    batches = torch.stack(samples(token_dir, steps * BATCH_SIZE)).split(BATCH_SIZE)
    seconds = []
    for batch in batches:
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - started)
    return seconds


def run_trainer(token_dir: str, steps: int, compiled: bool) -> list[float]:
    """Seconds of each step of Hugging Face's Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Stopwatch(TrainerCallback):
        seconds: list[float] = []  # noqa: RUF012

        def on_step_begin(self, *args, **kwargs):
            self.started = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            self.seconds.append(time.perf_counter() - self.started)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=steps,
            learning_rate=3e-4,
            max_grad_norm=1.0,
            bf16=True,
            use_cpu=True,
            optim="adamw_torch_fused",
            torch_compile=compiled,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        data = [{"input_ids": sample, "labels": sample} for sample in samples(token_dir, steps * BATCH_SIZE)]
        stopwatch = Stopwatch()
        Trainer(model=hugging_face_model(), args=arguments, train_dataset=data, callbacks=[stopwatch]).train()
    return stopwatch.seconds


def run_trainspec(token_dir: str, steps: int, compiled: bool) -> list[float]:
    """Seconds of each step as the engine itself writes them down, in a run started as a user would."""
    from trainspec_cli.run.folder.events import read_events
    from trainspec_cli.run.folder.paths import RunDir

    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder, "run"))
        arguments = [f"run.dir={run_dir.root}", "data=tokens", f"data.path={token_dir}", f"data.seq_len={SEQ_LEN}"]
        arguments += [f"model.{key}={value}" for key, value in MODEL.items()]
        arguments += ["model.tied_embeddings=false", "cluster.devices_per_node=1", "precision=bf16"]
        arguments += [f"batching.global_batch_size={BATCH_SIZE}", f"batching.micro_batch_size={BATCH_SIZE}"]
        arguments += [f"train.max_steps={steps}", f"compile={str(compiled).lower()}", "sample.max_new_tokens=0"]
        command = [sys.executable, "-m", "trainspec_cli", "launch", "recipe=tiny", *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return [event["step_time_s"] for event in read_events(run_dir.events(0)) if event["type"] == "step"]


FAMILIES = {"trainspec": run_trainspec, "trainer": run_trainer, "loop": run_loop}


def run_one(contender: str, token_dir: str, steps: int) -> float:
    """Tokens a second of one round, in this process."""
    family, _, setting = contender.partition("-")
    seconds = FAMILIES[family](token_dir, steps, setting == "compile")
    return SEQ_LEN * BATCH_SIZE / statistics.median(seconds[WARMUP_STEPS:])


def prepare_tokens() -> str:
    from trainspec_cli.data.corpus.prepare import prepare
    from trainspec_cli.recipe.keys.run import DataSpec, TokenizerSpec

    return str(prepare(DataSpec(SEQ_LEN, "python_stdlib", tokenizer=TokenizerSpec(MODEL["vocab_size"]))))


def measure_rounds(rounds: int, steps: int) -> dict[str, list[float]]:
    token_dir = prepare_tokens()
    found: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for turn in range(rounds):
        for contender in CONTENDERS:
            command = [sys.executable, __file__, "--one", contender, token_dir, "--steps", str(steps)]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[contender].append(float(out.split()[-1]))
            print(f"round {turn + 1}: {contender:18} {found[contender][-1]:8.0f} tokens/s", flush=True)
    return found


def show(found: dict[str, list[float]]) -> None:
    best = {}
    for family in FAMILIES:
        best[family] = max((c for c in found if c.startswith(family)), key=lambda c: statistics.median(found[c]))
    peer = max((best["trainer"], best["loop"]), key=lambda c: statistics.median(found[c]))
    print(f"\n{'contender':18} {'tokens/s':>9} {'spread':>15} {'ratio to best peer':>20}")
    for contender, figures in found.items():
        ratios = [ours / theirs for ours, theirs in zip(figures, found[peer], strict=True)]
        mark = " *" if contender in best.values() else ""
        print(
            f"{contender:18} {statistics.median(figures):9.0f} {min(figures):7.0f}-{max(figures):<7.0f} "
            f"{statistics.median(ratios):8.2f} ({min(ratios):.2f}-{max(ratios):.2f}){mark}"
        )
    print(f"* the family's better setting; best peer: {peer}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--one", nargs=2, metavar=("CONTENDER", "TOKEN_DIR"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(run_one(*options.one, options.steps))
        return
    found = measure_rounds(options.rounds, options.steps)
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
