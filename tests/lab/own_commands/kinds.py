"""Ways to make a step: kinds.py KIND makes 12 of them."""

import sys
import warnings

import torch

KIND = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


def loss() -> torch.Tensor:
    return model(torch.randn(4, 8)).square().mean()


def accumulating() -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for micro_batch in range(48):
        loss().backward()
        if micro_batch % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def in_backward() -> None:
    optimizers = {parameter: torch.optim.AdamW([parameter]) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(12):
        loss().backward()


def compiled() -> None:
    warnings.simplefilter("error", UserWarning)
    optimizer = torch.optim.AdamW(model.parameters())
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(12):
        loss().backward()
        step()
        optimizer.zero_grad()
    assert all("torch._dynamo.graph_break()" in why for why in torch._dynamo.utils.counters["graph_break"]), (
        "torch's own"
    )


def scaled() -> None:
    """The scaler skips the three of 15 steps whose gradients are not finite."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number in range(15):
        one = loss() * (float("inf") if number % 5 == 2 else 1.0)
        scaler.scale(one).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def trainer() -> None:
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.linear(x) - labels).square().mean()}

    data = [{"x": torch.randn(8), "labels": torch.randn(8)} for _ in range(96)]
    asked = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        num_train_epochs=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    Trainer(Model(), asked, train_dataset=data).train()


def accelerated() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(48):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(torch.randn(4, 8)).square().mean())
            optimizer.step()
            optimizer.zero_grad()


globals()[KIND]()
