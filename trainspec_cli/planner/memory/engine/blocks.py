"""A layer's forward and backward on a tape, with the operations and the lifetimes of the engine's own blocks."""

from __future__ import annotations

from functools import lru_cache, partial

from trainspec_cli.planner.memory.engine.attention import attention, latent_attention
from trainspec_cli.planner.memory.engine.experts import mixture
from trainspec_cli.planner.memory.engine.parts import Part, feed_forward, norm, region
from trainspec_cli.planner.memory.engine.profile import BlockProfile, profile
from trainspec_cli.planner.memory.engine.shape import Mixer, Shape
from trainspec_cli.planner.memory.engine.ssm import mamba
from trainspec_cli.planner.memory.engine.tape import Tape, Value
from trainspec_cli.spec.recipe.run import Recompute


@lru_cache(maxsize=1024)
def profile_block(shape: Shape, recompute: Recompute, split: bool) -> BlockProfile:
    """Of one layer, forward and backward. `split`: weights' gradients come later."""
    tape = Tape(shape.width, fp8=shape.fp8, frozen=shape.lora.rank > 0)
    tape.put_off = [] if split else None
    source = tape.leaf(shape.outside_tokens * shape.hidden, frozen=False)
    return profile(tape, lambda: block(tape, source, shape), recompute)


def block(tape: Tape, x: Value, shape: Shape) -> Value:
    """What a mixer gave lives until the block ends."""
    given = []
    for mixer in shape.layer.mixers:
        given.append(MIXERS[mixer](tape, norm(tape, x, shape), shape))
        x = tape.add(x, with_bias(tape, given[-1], mixer, shape))
    return x


def with_bias(tape: Tape, mixed: Value, mixer: Mixer, shape: Shape) -> Value:
    """That of attention's output is added outside of its region."""
    return tape.copy_in_forward(mixed) if mixer == "attention" and shape.decoder.attention_bias == "all" else mixed


def _in_region(part: Part) -> Part:
    return partial(region, part=part)


MIXERS: dict[Mixer, Part] = {
    "attention": _in_region(attention),
    "latent": _in_region(latent_attention),
    "feed_forward": _in_region(feed_forward),
    "experts": mixture,
    "mamba": _in_region(mamba),
}
