"""A block run on a tape, forward and backward, once or with its forward again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trainspec_cli.planner.memory.engine.tape import Stretch, Tape, Value
from trainspec_cli.spec.recipe.run import Recompute


@dataclass(frozen=True)
class BlockProfile:
    """Bytes; what comes in is counted where it was made, what goes out here."""

    forward: tuple[Stretch, ...]
    backward: tuple[Stretch, ...]
    """With the output's gradient, which takes its place, and the parameters'."""
    put_off: float
    """Kept from a backward of inputs until that of weights, where schedules split them."""

    @property
    def kept(self) -> float:
        """From forward to backward, the output included."""
        return self.forward[-1].live


def profile(tape: Tape, block: Callable[[], Value], recompute: Recompute) -> BlockProfile:
    """`block` writes itself down on `tape`, which is new."""
    tape.is_saving = recompute == "none"
    tape.kept = [] if recompute == "selective" else None
    out = block()
    tape.mark()
    forward, tape.stretches, saves = tuple(tape.stretches), [], tape.saves
    arriving, node = [tape.new(out.elements)], out.node
    del out
    tape.meter.peak = tape.meter.live
    if recompute != "none":
        tape.is_saving, tape.saves, tape.saves_left = True, 0, saves
        tape.recalled, tape.kept = deque(tape.kept or ()), None
        node = block().node
    assert node is not None
    tape.backward(node, arriving.pop())  # nothing else holds it
    tape.mark()
    put_off = {id(storage): storage.size for pair in tape.put_off or () for storage in pair}
    return BlockProfile(forward, tuple(tape.stretches), sum(put_off.values()))
