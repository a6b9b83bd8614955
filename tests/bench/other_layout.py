"""How long the search for another layout takes: llama3_405b on 16,384 H100, with one slow rank and with 300.

    python tests/bench/other_layout.py

The first search of a run also looks at which layouts there are; later ones know them. Processor time of this process.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from trainspec_cli.balance.other_layout import OtherLayouts
from trainspec_cli.planner.capacity import plan_capacity
from trainspec_cli.recipe.results.plan import LayoutProposal
from trainspec_cli.session.recipe.load import load_for_planning

RANKS = 16_384
SLOW = 300
PRESENT = {
    "the planner's": [],
    "tp x pp": ["layout.tp=8", "layout.pp=16", "layout.dp_shard=128", "layout.zero_stage=1", "recompute=full"],
}


def timed(propose: Callable[[Sequence[float]], LayoutProposal | None], paces: Sequence[float]) -> str:
    begun_s = time.process_time()
    found = propose(paces)
    taken_s = time.process_time() - begun_s
    return f"{taken_s:5.2f} s, {found.layout.describe() if found else 'no change'}"


def main() -> None:
    chance = random.Random(1)
    one, many = [1.0] * RANKS, [1.0] * RANKS
    one[5] = 2.1
    for rank in chance.sample(range(RANKS), SLOW):
        many[rank] = chance.uniform(1.2, 3.0)
    for name, arguments in PRESENT.items():
        spec = load_for_planning(["recipe=llama3_405b", *arguments]).spec
        best = plan_capacity(spec).best
        assert best is not None, "the recipe fits its cluster"
        print(f"{name} layout, {best.layout.describe()}")
        for slow, paces in ((1, one), (SLOW, many)):
            others = OtherLayouts.of_candidate(spec, best, None)
            for search in ("first", "next"):
                print(f"  {slow:3} slow ranks, {search:5} search: {timed(others.propose, paces)}")


if __name__ == "__main__":
    main()
