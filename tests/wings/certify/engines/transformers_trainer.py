"""transformers' Trainer as an engine of the training spec.

    trainspec certify --engine "python transformers_trainer.py"

It reads a request and writes an answer (docs/spec/engine-protocol.md). The Trainer makes the steps, clips, saves and
resumes; a request for which it has no setting is declined.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

SCHEMA = "trainspec.engine/1"


def why_declined(request):
    layout = request["layout"]
    spread = [axis for axis in ("cp", "tp", "pp", "ep") if layout[axis] > 1]
    if spread:
        return f"the Trainer does not support {spread[0]} on CPUs"
    if layout["dp_shard"] > 1 and request["device"] == "cpu":
        return "this script does not run FSDP on CPUs"
    return ""


class Watch(TrainerCallback):
    """Clips from the requested step on, and records the gradients of the first step."""

    def __init__(self, request):
        self.request, self.model, self.gradients = request, None, {}

    def on_step_begin(self, args, state, control, **kwargs):
        clip_from = self.request["clip_from"]
        clips = clip_from is not None and state.global_step >= clip_from
        args.max_grad_norm = self.request["clip_norm"] if clips else 0.0

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0 and "gradients" in self.request["asks"]:
            named = model.named_parameters()
            self.gradients = {name.removeprefix("module."): p.grad.float().clone() for name, p in named}


class InOrder(Trainer):
    """Takes the batches in the requested order and records each step's mean loss, which the log would round."""

    losses = ()

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses = (*self.losses, self.accelerator.reduce(loss.detach().clone(), "mean").item())
        return loss


def train(request):
    tokens = load_file(request["batches"])["tokens"][: request["steps"]]
    samples = tokens.shape[1]
    rows = tokens.flatten(0, 1)
    dataset = [{"input_ids": row, "labels": row} for row in rows]  # the model shifts its labels by one
    wanted, processes = request["optimizer"], int(os.environ.get("WORLD_SIZE", "1"))
    folder = Path(sys.argv[1]).parent
    arguments = TrainingArguments(
        output_dir=request["save_to"] or str(folder / "trainer"),
        use_cpu=request["device"] == "cpu",
        per_device_train_batch_size=samples // processes,
        max_steps=request["steps"],
        learning_rate=wanted["lr"],
        lr_scheduler_type="constant",
        optim="sgd" if wanted["name"] == "sgd" else "adamw_torch",
        weight_decay=wanted["weight_decay"],
        adam_beta1=wanted["beta1"],
        adam_beta2=wanted["beta2"],
        adam_epsilon=wanted["eps"],
        bf16=request["compute"] == "bf16",
        gradient_checkpointing=request["recompute"] == "full",
        torch_compile=request["compile"],
        logging_strategy="no",
        save_steps=request["save_after"] or 10**9,
        save_strategy="steps" if request["save_after"] else "no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        data_seed=0,
    )
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
    watch = Watch(request)
    trainer = InOrder(model=model, args=arguments, train_dataset=dataset, callbacks=[watch])
    resumed = Path(request["resume_from"]) / f"checkpoint-{request['first_step']}" if request["resume_from"] else None
    trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
    if trainer.is_world_process_zero():
        answer = {"schema": SCHEMA, "versions": {"transformers": transformers.__version__, "torch": torch.__version__}}
        if "losses" in request["asks"]:
            answer["losses"] = trainer.losses
        if "gradients" in request["asks"]:
            answer["gradients"] = "gradients.safetensors"
            save_file({n: g.contiguous() for n, g in watch.gradients.items()}, folder / answer["gradients"])
        if "weights" in request["asks"]:
            answer["weights"] = "weights.safetensors"
            model = trainer.accelerator.unwrap_model(trainer.model)
            last = {n: p.detach().float().contiguous() for n, p in model.named_parameters()}
            save_file(last, folder / answer["weights"])
        (folder / "answer.json").write_text(json.dumps(answer))


def main():
    request_file = Path(sys.argv[1])
    request = json.loads(request_file.read_text())
    if reason := why_declined(request):
        (request_file.parent / "answer.json").write_text(json.dumps({"schema": SCHEMA, "declined": reason}))
    elif request["processes"] > 1 and "RANK" not in os.environ:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(request["processes"]))
        sys.exit(subprocess.run([sys.executable, *torchrun, __file__, str(request_file)]).returncode)
    else:
        train(request)


if __name__ == "__main__":
    main()
