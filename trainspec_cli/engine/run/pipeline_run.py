"""Run forward and backward passes over a step's micro-batches, in the order of the pipeline's schedule.

Without a pipeline, the schedule alternates forward and backward, and the same code runs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from trainspec_cli.engine.build.train_state import Stages
from trainspec_cli.engine.digest import MicroBatch
from trainspec_cli.engine.parallel.data_parallel import exchange_in_backward, exchange_now, keep_parameters
from trainspec_cli.engine.parallel.pipeline import Mailbox, Message, Schedule, message_after
from trainspec_cli.planner.pipeline import Action, Kind


class PipelineRun:
    """Runs a schedule once. `loss` is summed over this rank's micro-batches; it is zero on ranks without the last
    stage."""

    def __init__(
        self,
        stages: Stages,
        schedule: Schedule,
        micro_batches: Sequence[MicroBatch],
        global_tokens: int,
    ):
        self.stages = stages
        self.micro_batches = micro_batches
        self.global_tokens = global_tokens
        self.loss = torch.zeros((), device=micro_batches[0][0].device)
        self._own = schedule[stages.lines.up.rank()]
        like = [stages.hidden.like(micro_batch[0]) for micro_batch in micro_batches]
        self._mail = Mailbox(stages.layout, schedule, stages.lines, like, stages.clock.collective)
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._left = Counter(action.stage for action in self._own if action.kind in _GRADIENTS_DONE)
        self._last = stages.layout.num_stages - 1

    def run(self) -> Tensor:
        """Run this rank's actions and return the loss. All gradients have been computed when this returns."""
        for action in self._own:
            samples = len(self.micro_batches[action.micro_batch][0])
            with self.stages.clock.part("forward" if action.kind == "forward" else "backward"):
                self.stages.allowance.check(action.kind, samples)
                _HANDLERS[action.kind](self, action)
                self.stages.throttle.wait(action.kind, action.stage, samples)
        self._mail.end()
        return self.loss

    def _forward(self, action: Action) -> None:
        part, (tokens, *others) = self.stages.parts[action.stage], self.micro_batches[action.micro_batch]
        entering = tokens if action.stage == 0 else self._mail.receive(Message(*_place(action), is_gradient=False))
        if action.stage > 0:
            self._inputs[_place(action)] = entering.requires_grad_()
        if action.stage > 0 and part.prediction_layers:
            leaving = part(entering, *others, tokens_BS=tokens)
        else:
            leaving = part(entering, *others)
        if action.stage == self._last:
            leaving = leaving / self.global_tokens
            self.loss += leaving.detach()
        else:
            self._send(action, leaving.detach())
        self._outputs[_place(action)] = leaving

    def _backward(self, action: Action) -> None:
        self._left[action.stage] -= 1
        part = self.stages.parts[action.stage]
        layout = self.stages.layout
        last = self._left[action.stage] == 0
        every_time = layout.exchanges_every_backward
        exchange_in_backward(part, every_time or last)
        keep_parameters(part, layout.keeps_parameters and not last)
        self.stages.noise.weigh(action.micro_batch if every_time else None)
        self._backpropagate(action)

    def _backward_input(self, action: Action) -> None:
        exchange_in_backward(self.stages.parts[action.stage], False)
        keep_parameters(self.stages.parts[action.stage], self.stages.layout.keeps_parameters)
        self.stages.queue.hold(*_place(action))
        self._backpropagate(action)
        self.stages.queue.stop_holding()

    def _backward_weight(self, action: Action) -> None:
        self.stages.queue.work_off(*_place(action))
        self._left[action.stage] -= 1
        if self._left[action.stage] == 0:
            self.stages.noise.weigh(None)
            exchange_now(self.stages.parts[action.stage])

    def _backpropagate(self, action: Action) -> None:
        leaving = self._outputs.pop(_place(action))
        entering = self._inputs.pop(_place(action), None)
        if entering is not None:
            # At the end of a backward pass, FSDP2 makes the compute stream wait for the sums of the stage's gradients.
            # A message sent after that would also have to wait, and so would all earlier stages.
            entering.register_post_accumulate_grad_hook(lambda own: self._send(action, own.grad))
        if action.stage == self._last:
            leaving.backward()
        else:
            torch.autograd.backward(leaving, self._mail.receive(Message(*_place(action), is_gradient=True)))
        assert entering is None or entering.grad is not None, "a stage's output depends on its input"

    def _send(self, action: Action, tensor: Tensor | None) -> None:
        assert tensor is not None, "the output has been computed"
        message = message_after(self.stages.layout, action)
        assert message is not None, "nothing is sent beyond the ends of the pipeline"
        self._mail.send(message, tensor)


_HANDLERS = {
    "forward": PipelineRun._forward,
    "backward": PipelineRun._backward,
    "backward_input": PipelineRun._backward_input,
    "backward_weight": PipelineRun._backward_weight,
}
_GRADIENTS_DONE: tuple[Kind, ...] = ("backward", "backward_weight")


def _place(action: Action) -> tuple[int, int]:
    return action.stage, action.micro_batch


@torch.no_grad()
def forward_only(stages: Stages, tokens: Tensor, *others: Tensor) -> Tensor | None:
    """Run one micro-batch through all stages. On the rank of the last stage, return its output: the summed loss or,
    without targets, the logits."""
    layout = stages.layout
    last = layout.num_stages - 1
    schedule = [
        [Action("forward", stage, 0) for stage in range(last + 1) if layout.rank_of_stage(stage) == rank]
        for rank in range(layout.pp)
    ]
    mail = Mailbox(layout, schedule, stages.lines, [stages.hidden.like(tokens)], stages.clock.collective)
    leaving = None
    for action in schedule[stages.lines.up.rank()]:
        entering = tokens if action.stage == 0 else mail.receive(Message(action.stage, 0, is_gradient=False))
        leaving = stages.parts[action.stage](entering, *others)
        if action.stage < last:
            mail.send(Message(action.stage + 1, 0, is_gradient=False), leaving)
    mail.end()
    return leaving if last in stages.parts else None
