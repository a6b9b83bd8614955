import torch

from trainspec_cli.engine.build.train_state import allocate, materialise
from trainspec_cli.engine.models.decoder import Decoder
from trainspec_cli.engine.shares import Share
from trainspec_cli.spec.recipe.model import DecoderModel

CPU = torch.device("cpu")
MODEL = DecoderModel(
    num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=96, vocab_size=100
)


def made(seed: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Decoder(MODEL, 8)
    allocate(model, CPU, offload=False)
    materialise(model, [Share(name, parameter) for name, parameter in model.named_parameters()], CPU, seed)
    assert torch.isfinite(model.cos_SE).all()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_the_seed_alone_decides():
    first, again, other = made(1), made(1), made(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if first[name].dim() > 1)


def test_matrices_differ_and_have_their_standard_deviation():
    made_parameters = made(0)
    assert not torch.equal(
        made_parameters["blocks.0.attention.q.weight"], made_parameters["blocks.1.attention.q.weight"]
    )
    assert abs(made_parameters["blocks.0.attention.q.weight"].std() / 0.02 - 1) < 0.1
    assert abs(made_parameters["blocks.0.ffn.down.weight"].std() / (0.02 / 2) - 1) < 0.1
    assert torch.equal(made_parameters["norm.weight"], torch.ones(64))
