import hashlib

import pytest
import torch

from trainspec_cli.engine.build.assemble import allocate, materialise
from trainspec_cli.engine.models.decoder import Decoder
from trainspec_cli.engine.shares import Cut, Share
from trainspec_cli.recipe.keys.model import DecoderModel

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
    assert model.positions_S.tolist() == list(range(8)), "all of them"
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_a_parameters_generator_is_seeded_by_the_runs_seed_and_its_name():
    """The seed is the first eight bytes of a SHA-256: one seed gives the same first weights in every version."""
    digest = hashlib.sha256(b"17/blocks.0.ffn.up.weight").digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") // 2)
    expected = torch.empty(96, 64).normal_(0.0, 0.02, generator=generator)
    assert torch.equal(made(17)["blocks.0.ffn.up.weight"], expected)


def test_a_rank_with_a_part_has_that_part_of_the_whole():
    whole = made(5)
    with torch.device("meta"):
        model = Decoder(MODEL, 8)
        part = torch.nn.Parameter(torch.empty(32, 96))
        model.blocks["1"].ffn.down.weight = part
    allocate(model, CPU, offload=False)
    cut = Cut(0, 64, 1, 2, group=None)  # type: ignore[arg-type]
    name = "blocks.1.ffn.down.weight"
    shares = [Share(n, p, cut if n == name else None) for n, p in model.named_parameters()]
    positions = torch.tensor([6, 7, 0, 1])
    materialise(model, shares, CPU, 5, positions)
    found = dict(model.named_parameters())
    assert torch.equal(found[name], whole[name][32:])
    assert torch.equal(found["embed.weight"], whole["embed.weight"])
    assert model.positions_S.tolist() == [6, 7, 0, 1]


@pytest.mark.parametrize(("offload", "parameters"), [(True, "cpu"), (False, "meta")])
def test_offloaded_parameters_stay_in_host_memory_and_buffers_do_not(offload, parameters):
    """The meta device represents another device."""
    with torch.device("meta"):
        model = Decoder(MODEL, 8)
    allocate(model, torch.device("meta"), offload=offload)
    assert {parameter.device.type for parameter in model.parameters()} == {parameters}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    assert len(list(model.buffers())) == 3
