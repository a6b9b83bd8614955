"""`json_worker.py RANK RENDEZVOUS`: one of three ranks that exchange JSON; prints what came of each case, as JSON."""

import json
import pickle
import sys
from functools import partial

import torch
import torch.distributed as dist

from trainspec_cli.core.errors import MachineError, Problem, RecipeError, TrainspecError
from trainspec_cli.engine.comm import json_collectives
from trainspec_cli.engine.comm.joining import leave_processes
from trainspec_cli.engine.comm.json_collectives import agree_on_error, broadcast_json, gather_json, raise_together
from trainspec_cli.recipe.records import convert

RANK, WORLD = int(sys.argv[1]), 3
DAMAGED = {
    "no UTF-8": b"\xff\xfe\x00",
    "no JSON": b"{'a': 1}",
    "a pickle": pickle.dumps({"a": 1}),
    "NaN": b"NaN",
    "deep nesting": b"[" * 100_000,
    "another type": b'{"text": 7}',
}


def same(told):
    return told


def refused(act):
    try:
        return f"taken: {act()}"
    except TrainspecError as error:
        return [type(error).__name__, error.problems[0].code, str(error)]


def send_bytes(content: bytes):
    """Rank 1 sends `content` where JSON is due."""
    honest = json_collectives._encode
    if RANK == 1:
        json_collectives._encode = lambda _value: torch.frombuffer(bytearray(content), dtype=torch.uint8)
    try:
        return refused(lambda: gather_json("told", partial(convert, str)))
    finally:
        json_collectives._encode = honest


def send_length(length: int):
    """Rank 1 announces a message of `length`."""
    if RANK == 1:
        lengths = torch.empty(WORLD, dtype=torch.int64)
        dist.all_gather(list(lengths.split(1)), torch.tensor([length]))
        return None
    return refused(lambda: gather_json("told", same))


def broadcast_bytes(content: bytes):
    """Rank 1 is the one that tells."""
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if RANK == 1:
        dist.broadcast(torch.tensor([text.numel()]), 1)
        dist.broadcast(text, 1)
        return None
    return refused(lambda: broadcast_json(None, partial(convert, str), src=1))


def in_groups():
    ends = dist.new_group([0, 2])
    if RANK == 1:
        return None
    return [gather_json(f"of {RANK}", same, ends), broadcast_json(f"from {RANK}", same, src=2, group=ends)]


def agree(*errors):
    error = agree_on_error(errors[RANK])
    return error and [type(error).__name__, error.exit_code, [problem.as_json() for problem in error.problems]]


def cases():
    yield "unequal lengths", lambda: [len(text) for text in gather_json("x" * (70_000 * RANK), same)]
    yield "empty", lambda: gather_json([None, "", {}][RANK], same)
    yield "unicode", lambda: gather_json(["é", "数値 🧪", "a\udcff\n"][RANK], same)
    yield "tuples and keys", lambda: gather_json({"at": (RANK, 2.5), "7": True}, same)
    yield "broadcast", lambda: broadcast_json({"of": RANK}, same, src=2)
    yield "not JSON elsewhere", lambda: broadcast_json("told" if RANK == 0 else object(), same)
    yield "groups", in_groups
    for name, content in DAMAGED.items():
        yield name, lambda content=content: send_bytes(content)
    for length in (0, -5, 2**40):
        yield f"length {length}", lambda length=length: send_length(length)
    yield "damaged broadcast", lambda: broadcast_bytes(b"[1")
    yield "another group's rank", lambda: in_another_group()
    problem = Problem("bad", "é is bad", "init.from", "type é", file="f", line=3)
    yield "no error", lambda: agree(None, None, None)
    yield "one error", lambda: agree(None, None, MachineError(problem))
    yield "two errors", lambda: agree(None, RecipeError([problem, problem]), MachineError("late"))
    yield "raised together", lambda: refused(lambda: raise_together(RecipeError("mine", code="x") if RANK else None))
    yield "afterwards", lambda: gather_json(RANK, partial(convert, int))


def in_another_group():
    """The rank that is named is one of all ranks."""
    others = dist.new_group([1, 2])
    return refused(lambda: gather_json([RANK], _refuse_two, others)) if RANK else None


def _refuse_two(told):
    if told == [2]:
        raise ValueError("it is two")


def main() -> None:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=WORLD)
    print(json.dumps({name: act() for name, act in cases()}))
    leave_processes()


main()
