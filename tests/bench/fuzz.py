"""Feed damaged and hostile inputs to the command line, as many as are asked for, and count how it ends.

    python -m tests.bench.fuzz --inputs 10000 --seed 0

Recipes, command lines, composed recipes and signed certificates are damaged in turn. Each input has to end with a
documented exit code, without a traceback and within a minute; the first that does not is shown, and ends this with 1.
An input depends on the seed and on its number alone, so `--first N` begins at one that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.conftest import damaged_bytes, strange_variants, tell
from fuzz.test_recipes import NUMBERS, PATHS, RECIPE
from lab.keys import make_key

from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.certificate import Finding
from trainspec_cli.wings.certify.certificate import digest, read_key, sign_certificate, write_certificate


def damaged(content: bytes, chance: random.Random) -> bytes:
    return next(damaged_bytes(content, 1, seed=chance.randrange(2**30)))


def recipe(chance: random.Random) -> int:
    Path("recipes").mkdir(exist_ok=True)
    Path("recipes/mine.yaml").write_bytes(damaged(RECIPE.encode(), chance))
    return tell("validate", "recipe=mine")[0]


def command_line(chance: random.Random) -> int:
    changes = [f"{chance.choice(PATHS)}={chance.choice(NUMBERS)}" for _ in range(2)]
    return tell("validate", f"recipe={chance.choice(['tiny', 'quickstart'])}", *changes)[0]


def composed(chance: random.Random) -> int:
    Path("composed.yaml").write_bytes(damaged(RECIPE.encode(), chance))
    return tell("show", "recipe=tiny", "--diff", "composed.yaml")[0]


def certificate(chance: random.Random) -> int:
    """Half of them have strange values under a digest of their own, as anybody can make one."""
    whole = json.loads(Path("whole.json").read_text())
    if chance.random() < 0.5:
        Path("damaged.json").write_bytes(damaged(Path("whole.json").read_bytes(), chance))
    else:
        variant = chance.choice(list(strange_variants(whole)))
        if isinstance(variant, dict):
            try:
                variant["digest"] = digest(variant)
            except ValueError:
                variant["digest"] = "none"
        Path("damaged.json").write_text(json.dumps(variant))
    told, _ = tell("certify", "--verify", "damaged.json", "--key", "key.pub")
    if told == 0 and json.loads(Path("damaged.json").read_text()) != whole:
        raise AssertionError("an altered certificate was accepted")
    return told


KINDS: tuple[Callable[[random.Random], int], ...] = (recipe, command_line, composed, certificate)


def prepare() -> None:
    make_key(Path("key"))
    findings = [Finding("NUM-1", "dense-fp32-tp2", True, {"worst_gradient_error": 5e-7, "parameter": "p"}, 1e-5)]
    stated = {"date": "2026-01-01", "measured_since": "2026-01-01", "machine_id": "ab" * 16}
    made = write_certificate(findings, Machine("box", 2, 2**34), **stated)
    Path("whole.json").write_text(json.dumps(to_plain(sign_certificate(made, read_key(Path("key"))))))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--inputs", type=int, default=10_000)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    began, ends = time.monotonic(), Counter[tuple[str, int]]()
    with tempfile.TemporaryDirectory(prefix="trainspec-fuzz-") as folder:
        os.chdir(folder)
        os.environ["TRAINSPEC_CACHE"] = str(Path(folder) / "cache")
        prepare()
        for number in range(given.first, given.first + given.inputs):
            kind = KINDS[number % len(KINDS)]
            try:
                ends[kind.__name__, kind(random.Random(f"{given.seed} {number}"))] += 1
            except BaseException as error:
                print(f"input {number} ({kind.__name__}, seed {given.seed}): {error}", file=sys.stderr)
                return 1
    for (name, code), count in sorted(ends.items()):
        print(f"{name:<14} exit code {code:<4} {count:>7,}")
    print(f"{given.inputs:,} inputs, none with an internal error, in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
