"""Documents in one row: the loss of each is what it would be alone."""

import pytest
import torch

from trainspec_cli.engine.build.assemble import build_model
from trainspec_cli.engine.digest import IGNORED_TARGET
from trainspec_cli.recipe.keys.model import DecoderModel, LatentAttentionSpec

SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_size": 48,
    "vocab_size": 61,
}
MODELS = {
    "plain": DecoderModel(**SIZES, qk_norm=True),
    "windowed": DecoderModel(**SIZES, sliding_window=4, global_attention_every=2),
    "sinks": DecoderModel(**SIZES, attention_sinks=True, sliding_window=4, global_attention_every=0),
    "latent": DecoderModel(**SIZES, mla=LatentAttentionSpec(16, 0, 8, 8, 8)),
}


def drawn(model):
    built = build_model(model, 24).double()
    for number, parameter in enumerate(built.parameters()):
        parameter.data.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(number))
    built.init_buffers()
    return built


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_of_packed_documents_is_the_sum_of_their_own(name):
    model = drawn(MODELS[name])
    tokens = torch.randint(0, 61, (1, 20), generator=torch.Generator().manual_seed(3))
    targets = tokens.roll(-1, dims=1)
    lengths = [7, 9, 4]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    packed = model(tokens, targets, documents)
    alone = [model(*part) for part in zip(tokens.split(lengths, 1), targets.split(lengths, 1), strict=True)]
    assert packed.item() == pytest.approx(sum(loss.item() for loss in alone), rel=1e-6)
    assert packed.item() != pytest.approx(model(tokens, targets).item(), rel=1e-4), "without masks they see one another"


def test_padding_changes_nothing():
    model = drawn(MODELS["plain"])
    tokens = torch.arange(12)[None]
    documents = torch.tensor([[0] * 8 + [-1] * 4])
    targets = torch.where(documents >= 0, tokens + 1, IGNORED_TARGET)
    alone = model(tokens[:, :8], targets[:, :8])
    assert model(tokens, targets, documents).item() == pytest.approx(alone.item(), rel=1e-6)
