"""Text that a model writes, with shapes that recur."""

from __future__ import annotations

import torch

from trainspec_cli.engine.evaluate import write_text
from trainspec_cli.engine.models.decoder import Decoder
from trainspec_cli.spec.model import DecoderModel

CONTEXT = 20


def decoder() -> Decoder:
    torch.manual_seed(0)
    model = Decoder(DecoderModel(2, 32, 2, 1, 16, 48, 50), CONTEXT)
    model.init_buffers()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def test_padding_changes_nothing_in_the_text() -> None:
    model = decoder()
    ids = [1, 2, 3]
    for _ in range(30):
        ids.append(int(model(torch.tensor([ids[-CONTEXT:]]))[0, -1].argmax()))
    assert write_text(model, [1, 2, 3], count=30, temperature=0.0, max_context=CONTEXT, seed=0) == ids[3:]


def test_few_lengths_are_ever_met() -> None:
    model, lengths = decoder(), set()
    model.register_forward_pre_hook(lambda _, arguments: lengths.add(arguments[0].shape[1]))
    write_text(model, [1, 2, 3], count=30, temperature=1.0, max_context=CONTEXT, seed=0)
    assert lengths == {16, 20}
