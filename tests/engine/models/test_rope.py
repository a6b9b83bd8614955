"""Frequencies of rotary embeddings against those that transformers computes."""

from __future__ import annotations

import math

import pytest
import torch

from trainspec_cli.engine.models.rope import rope_angles, score_factor
from trainspec_cli.recipe.keys.model import RopeScaling

HEAD = 64
LLAMA3 = RopeScaling("llama3", 8.0, 512, low_freq_factor=2.0, high_freq_factor=6.0)
CASES = {
    "llama3": (1e4, LLAMA3),
    "yarn": (1e4, RopeScaling("yarn", 4.0, 4096)),
    "yarn, other turns": (1e4, RopeScaling("yarn", 16.0, 4096, beta_fast=20.0, beta_slow=3.0)),
    "yarn, fractional bounds": (1e4, RopeScaling("yarn", 4.0, 4096, whole_bounds=False)),
    "yarn, lower bound below the first pair": (1e4, RopeScaling("yarn", 4.0, 64)),
    "yarn, upper bound beyond the head": (10.0, RopeScaling("yarn", 4.0, 4096)),
    "yarn, bounds at one place": (
        1e4,
        RopeScaling("yarn", 4.0, 4096, beta_fast=8.0, beta_slow=8.0, whole_bounds=False),
    ),
}


def theirs(theta: float, scaling: RopeScaling) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": scaling.kind,
        "rope_theta": theta,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_seq_len,
    }
    if scaling.kind == "llama3":
        parameters |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    else:
        parameters |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.whole_bounds}
    config = transformers.LlamaConfig(
        hidden_size=2 * HEAD,
        num_attention_heads=2,
        head_dim=HEAD,
        max_position_embeddings=int(scaling.factor * scaling.original_seq_len),
        rope_parameters=parameters,
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS[scaling.kind](config, torch.device("cpu"))
    return frequencies


@pytest.mark.parametrize("name", CASES)
def test_scaled_frequencies_are_those_of_transformers(name: str) -> None:
    theta, scaling = CASES[name]
    angles = rope_angles(3, HEAD, theta, scaling=scaling)
    expected = theirs(theta, scaling)
    torch.testing.assert_close(angles[1], expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(angles[2], 2 * expected, rtol=1e-5, atol=0)
    assert not angles[0].any()


def test_yarn_softens_scores() -> None:
    assert score_factor(RopeScaling("yarn", 40.0, 4096)) == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    assert score_factor(LLAMA3) == score_factor(None) == 1.0
