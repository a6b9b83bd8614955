"""The callback for transformers' Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from torch.nn import Module

    from trainspec_cli.wings.own_script.attachment.run import AttachedRun


class RunCallback(TrainerCallback):
    """Records each step when the next one starts, because the Trainer does not log a step's loss until after the step.
    Later starts resume from the Trainer's own checkpoints."""

    def __init__(self, run: AttachedRun):
        self._run = run
        self._ended = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        model: Module = given["model"]
        self._run.begin(state.global_step, sum(parameter.numel() for parameter in model.parameters()))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._record()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._ended = True
        if self._run.is_stopping:
            control.should_save = control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        logs = logs or {}
        if "loss" in logs:
            self._run.log(loss=logs["loss"], grad_norm=logs.get("grad_norm"), lr=logs.get("learning_rate"))

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        self._record()
        metrics = metrics or {}
        if "eval_loss" in metrics:
            self._run.evaluated(metrics["eval_loss"], seconds=metrics.get("eval_runtime", 0.0))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._record()

    def _record(self) -> None:
        if self._ended:
            self._ended = False
            self._run.step_done()
