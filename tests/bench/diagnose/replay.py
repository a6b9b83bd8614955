"""Replay steps of emulated devices, thousands of times faster than running them, under any disturbance.

    python -m tests.bench.diagnose.replay --out FOLDER [--cases 30] [--first 0] [--healthy 10000]

For each layout, ranks run the engine's own steps once on emulated devices, and record what the host queues: operations
with their durations, events, waits and exchanges. A replay runs these queues again with the device's rules and costs
(`wings/emulated/engine/costs.py`): without a disturbance, the parts of a step are those of the recorded run. Batches
and checkpoints are added to it: each step waits for its batch, which a loader reads up to two steps ahead, and every
eighth step writes a checkpoint. Links are sampled in every third step.

Prints how many of the disturbances of `emulated.py` are named with cause and place, and whether healthy steps raise an
alarm.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # `lab`, as in the tests

from trainspec_cli.balance.batch.division import even_division
from trainspec_cli.balance.decisions.links import AxisLinks, Transfer
from trainspec_cli.balance.decisions.shares import ShareScheduler, counts_updates, data_rows, exchange_each_s
from trainspec_cli.balance.decisions.speeds import SETTLING_S, SpeedTracker, slowest
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.training import SchedulerSpec
from trainspec_cli.reporter.diagnosis.conclude import conclude
from trainspec_cli.reporter.diagnosis.evidence import COUNTERS, RunEvidence
from trainspec_cli.reporter.diagnosis.watch import REMEMBERED_STEPS
from trainspec_cli.run.folder.event_types.events import PARTS, LinkEvent
from trainspec_cli.wings.certify.cases import Case, build_plan
from trainspec_cli.wings.emulated import read_settings
from trainspec_cli.wings.emulated.engine.costs import ChipCosts, costs_of

from .emulated import CAUSES, CHIP, WRITTEN_STEPS, Disturbed, brief, draw, judge, nodes_of, part_of

LAYOUTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "dp": ("dense", {"dp_replicate": 4}, 4),
    "zero3": ("dense", {"dp_shard": 4, "zero_stage": 3}, 4),
    "experts": ("moe", {"dp_shard": 4, "ep": 2}, 4),
    "dp_nodes": ("dense", {"dp_replicate": 4}, 2),
    "tp_dp_nodes": ("dense", {"dp_shard": 2, "tp": 2}, 2),
    "pp_dp_nodes": ("dense", {"dp_shard": 2, "pp": 2}, 2),
}
"""Family, layout and ranks on a node."""
BASE = "time=bench,launch_us=400,read_ms=5,write_ms=2,link_slowness=500"
WARM_STEPS = 3
SAMPLED_STEPS = 3
HEALTHY_STEPS = 26
MICRO_BATCH = 2


# Record


def record(layout: str) -> dict[str, Any]:
    """Run steps in this process, one of the layout's ranks; return the actions of the last step."""
    import torch
    import torch.distributed as dist

    from trainspec_cli.engine.accelerators import enter
    from trainspec_cli.engine.build.assemble import build_train_state
    from trainspec_cli.engine.comm.joining import join_processes
    from trainspec_cli.engine.mesh import build_mesh
    from trainspec_cli.engine.run.step import train_step
    from trainspec_cli.engine.run.step_report import StepReport
    from trainspec_cli.wings.emulated.engine import exchanges, streams
    from trainspec_cli.wings.emulated.engine.memory import EmulatedMemory

    family, axes, _ = LAYOUTS[layout]
    enter("cpu")
    there = join_processes("cpu")
    plan = build_plan(Case(family, Layout(**axes), micro_batch_size=MICRO_BATCH), "cpu")
    state = build_train_state(plan, there, build_mesh(plan.layout, there.type))
    actions: list[list[Any]] = []
    moments: list[Any] = []
    numbers: dict[int, int] = {}
    pending: dict[str, Any] = {"scaled": False}

    def number_of(moment: Any) -> int:
        if id(moment) not in numbers:
            numbers[id(moment)] = len(moments)
            moments.append(moment)
        return numbers[id(moment)]

    add, finish = streams.Stream.add, streams.Stream.finish
    wait, synchronize = streams.StreamEvent.wait, streams.StreamEvent.synchronize
    factor, attention, allocate = ChipCosts.factor, ChipCosts.attention_slowness, EmulatedMemory.allocate
    describe, queue = exchanges.describe, exchanges.queue

    def noted_add(stream: Any, work: Any) -> None:
        exchange = pending.pop("exchange") if work.exchange is not None else None
        after, moment = (None if one is None else number_of(one) for one in (work.after, work.moment))
        actions.append(["add", stream.number, work.duration_s, pending["scaled"], after, moment, exchange])
        pending["scaled"] = False
        add(stream, work)

    def noted_finish(stream: Any) -> None:
        finish(stream)
        actions.append(["sync", actions[-1][5]])

    def noted_wait(event: Any, stream: Any = None) -> None:
        wait(event, stream)

    def noted_synchronize(event: Any) -> None:
        if event.at is not None:
            actions.append(["sync", number_of(event.at)])
        synchronize(event)

    def noted_factor(*given: Any) -> float:
        pending["scaled"] = True
        return factor(*given)

    def noted_attention(*given: Any) -> float:
        pending["scaled"] = "attention"
        return attention(*given)

    def noted_allocate(memory: Any, nbytes: int, stream: Any, shape: str = "") -> Any:
        actions.append(["allocate", stream.number])
        return allocate(memory, nbytes, stream, shape)

    def noted_describe(*given: Any) -> Any:
        pending["described"] = describe(*given)
        return pending["described"]

    def noted_queue(communicator: Any, channel: str, work: Any) -> Any:
        kind, mine = pending["described"]
        ranks = communicator.ranks
        if channel:
            ends = [dist.get_rank(), communicator.ranks[int(channel.split()[-1])]]
            ranks = ends if channel.startswith("send") else ends[::-1]
        pending["exchange"] = [kind, ranks, mine.nbytes, communicator.group.group_name]
        return queue(communicator, channel, work)

    streams.Stream.add, streams.Stream.finish = noted_add, noted_finish
    streams.StreamEvent.wait, streams.StreamEvent.synchronize = noted_wait, noted_synchronize
    ChipCosts.factor, ChipCosts.attention_slowness = noted_factor, noted_attention
    EmulatedMemory.allocate = noted_allocate
    exchanges.describe, exchanges.queue = noted_describe, noted_queue
    streams.HOST.launch = lambda: actions.append(["launch"])
    shape = (MICRO_BATCH, plan.spec.data.seq_len)
    batches = [torch.randint(0, 64, shape, device=there) for _ in range(plan.grad_accum_steps)]
    unread: list[Any] = []
    told: dict[str, float] = {}

    def report() -> StepReport:
        for segments in unread:
            told.update(segments.parts_s())
        unread.clear()
        return StepReport()

    state.clock.restart()
    for _ in range(WARM_STEPS + 1):
        first_action, first_moment = len(actions), len(moments)
        pairs = [(tokens, tokens) for tokens in batches]
        outcome = train_step(
            state, pairs, global_tokens=4 * len(pairs) * batches[0].numel(), clip_norm=1.0, make_report=report
        )
        assert outcome is not None
        outcome.on_host()
        segments = state.clock.cut()
        unread.append(segments)
    marks = [(name, number_of(at.at)) for name, at in segments.marks]
    step = {
        "actions": actions[first_action:],
        "first": first_moment,
        "moments": len(moments) - first_moment,
        "marks": marks,
        "end": number_of(segments.end.at),
        "agreed": [number_of(one.at) for one in segments.agreed],
    }
    report()
    dist.barrier()
    return {**step, "parts_s": told}


def record_all(layout: str, folder: Path) -> list[dict[str, Any]]:
    """Return the recorded step of each rank, from a file of an earlier call if there is one."""
    file = folder / f"{layout}.json"
    if not file.exists():
        _, axes, node_ranks = LAYOUTS[layout]
        world_size = Layout(**axes).world_size
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "conf" / "accelerator").mkdir(parents=True)
            (Path(place) / "conf" / "accelerator" / "bench.yaml").write_text(CHIP)
            root = Path(__file__).parents[3]
            job = {
                "TRAINSPEC_DEVICE": "emulated", "TRAINSPEC_EMULATED": BASE.replace("launch_us=400", "launch_us=0"),
                "TRAINSPEC_STORE_FILE": f"{place}/store", "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": str(node_ranks), "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root}:{root}/tests",
            }  # fmt: skip
            command = [sys.executable, "-m", "tests.bench.diagnose.replay", "--record", layout]
            ranks = [
                subprocess.Popen(command, cwd=place, env=os.environ | job | {"RANK": str(rank)}, stdout=subprocess.PIPE)
                for rank in range(world_size)
            ]
            printed = [rank.communicate()[0] for rank in ranks]
        file.write_text(json.dumps([json.loads(one) for one in printed]))
    recorded: list[dict[str, Any]] = json.loads(file.read_text())
    return recorded


# Replay


@dataclass
class Work:
    queued_s: float
    duration_s: float
    after: int | None
    moment: int | None
    exchange: tuple[Any, ...] | None
    has_arrived: bool = False


@dataclass
class Rank:
    """A rank's host and streams, and the times of its moments, numbered through all steps."""

    rank: int
    step: Mapping[str, Any]
    costs: ChipCosts
    launch_s: float
    now_s: float = 0.0
    loader_s: float = 0.0
    reached_s: dict[int, float] = field(default_factory=dict)
    queued_s: dict[int, float] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Stream -> the time at which its completed work ended."""
    queues: dict[int, deque[Work]] = field(default_factory=lambda: defaultdict(deque))
    counted: Counter[Any] = field(default_factory=Counter)
    """Exchanges by group."""
    taken_s: deque[float] = field(default_factory=lambda: deque([0.0] * 2, maxlen=2))
    """When the last batches were taken."""
    steps: list[dict[str, float]] = field(default_factory=list)
    attended: Sequence[float] = ()
    """The fraction of the pairs of tokens that attend to one another, by step."""
    retries: Counter[int] = field(default_factory=Counter)
    """The allocator's, by step."""

    def host(self, steps: int, meeting: Meeting) -> Iterator[int]:
        """Queue the work of all steps; yield the moment for which the host waits. A step is known two steps later."""
        count = self.step["moments"]
        first = self.step["first"]
        marks: list[tuple[list[tuple[str, int]], int, list[int]]] = []
        is_plain = all(one.host_slowness == 1.0 for one in self.costs.disturbances)
        extra = -1
        begun = 0
        for index in range(steps):
            shift = index * count - first

            def moment_of(recorded: int, shift: int = shift) -> int:
                return recorded + shift

            # The batch: read in order, at the earliest when its slot is free.
            self.loader_s = max(self.loader_s, self.taken_s[0])
            self.loader_s += self.costs.host_s(self.loader_s, work="read")
            waits = [self._mark(0, extra - 1), self._mark(0, extra - 2, not_before_s=self.loader_s)]
            extra -= 2
            self.now_s = max(self.now_s, self.loader_s)
            self.taken_s.append(self.now_s)
            for action in self.step["actions"]:
                if action[0] == "launch":
                    self.now_s += self.launch_s if is_plain else self.costs.host_s(self.now_s, self.launch_s)
                elif action[0] == "allocate":
                    if retry_s := self.costs.retry_s(self.now_s):
                        freed = self._mark(action[1], extra - 1)
                        extra -= 1
                        self.progress(meeting)
                        if freed not in self.reached_s:
                            yield freed
                        self.now_s = max(self.now_s, self.reached_s[freed])
                        self.now_s += self.costs.host_s(self.now_s, retry_s)
                        self.costs.retried_s = self.now_s
                        self.retries[index] += 1
                elif action[0] == "sync":
                    number = moment_of(action[1])
                    if number >= 0 and number not in self.reached_s:
                        yield number
                    self.now_s = max(self.now_s, self.reached_s.get(number, 0.0))
                else:
                    _, stream, seconds, scaled, after, moment, exchange = action
                    if scaled and seconds:
                        seconds *= self.costs.factor(SimpleNamespace(number=stream), self.now_s)  # type: ignore[arg-type]
                    if scaled == "attention" and (slowness := self.costs.attention_slowness(self.now_s)) != 1.0:
                        seconds *= slowness * self.attended[index]
                    if exchange is not None:
                        kind, ranks, nbytes, group = exchange
                        place = (group, tuple(ranks) if kind in ("send", "recv") else ())
                        self.counted[place] += 1
                        exchange = (place, self.counted[place], kind, tuple(ranks), nbytes)
                    where = None if after is None else moment_of(after)
                    if where is not None and where < 0:
                        where = None  # before the replay began
                    number_or_none = None if moment is None else moment_of(moment)
                    if number_or_none is not None:
                        self.queued_s[number_or_none] = self.now_s
                    queue = self.queues[stream]
                    queue.append(Work(self.now_s, seconds, where, number_or_none, exchange))
                    # Without a moment, no other stream can go on because of it.
                    if len(queue) == 1 and self._run(stream, queue[0], meeting):
                        queue.popleft()
                        if number_or_none is not None:
                            self.progress(meeting)
            end = moment_of(self.step["end"])
            if (index + 1) % WRITTEN_STEPS == 0:
                self.now_s += self.costs.host_s(self.now_s, work="write")
            written = self._mark(0, extra - 1)
            extra -= 1
            self.progress(meeting)
            own = [("data_wait", waits[0]), ("other", waits[1])]
            own += [(name, moment_of(at)) for name, at in self.step["marks"][1:]]
            marks.append(([*own, ("checkpoint", end)], written, [moment_of(one) for one in self.step["agreed"]]))
            begun = max(0, index - 1)
            if index:
                yield from self._read(marks[begun])
        yield from self._read(marks[-1])

    def _mark(self, stream: int, number: int, not_before_s: float = 0.0) -> int:
        """Record a moment in a stream, once it has reached a time."""
        self.queued_s[number] = self.now_s
        self.queues[stream].append(Work(max(self.now_s, not_before_s), 0.0, None, number, None))
        return number

    def _read(self, marks: tuple[list[tuple[str, int]], int, list[int]]) -> Iterator[int]:
        named, end, agreed = marks
        if end not in self.reached_s:
            yield end
        parts_s = dict.fromkeys(PARTS, 0.0)
        starved_s = 0.0
        places = [place for _, place in named] + [end]
        for (name, begin), ended in zip(named, places[1:], strict=True):
            lasted_s = self.reached_s[ended] - self.reached_s[begin]
            parts_s[name] += lasted_s
            ahead_s = self.reached_s[ended] - self.queued_s[ended]
            if name in ("forward", "backward", "optimizer") and ahead_s < max(2e-4, 0.1 * lasted_s):
                starved_s += lasted_s
        agreed_s = self.reached_s[agreed[1]] - self.reached_s[agreed[0]]
        self.steps.append({**parts_s, "starved_s": starved_s, "agreed_s": agreed_s})

    def progress(self, meeting: Meeting) -> bool:
        """Run what can run."""
        has_changed = False
        is_moving = True
        while is_moving:
            is_moving = False
            for stream, queue in list(self.queues.items()):
                while queue and self._run(stream, queue[0], meeting):
                    queue.popleft()
                    is_moving = has_changed = True
        return has_changed

    def _run(self, stream: int, work: Work, meeting: Meeting) -> bool:
        if not work.has_arrived:
            at_s = self.ends[stream]
            if work.after is not None:
                reached_s = self.reached_s.get(work.after)
                if reached_s is None:
                    return False
                at_s = max(at_s, reached_s)
            self.ends[stream] = max(at_s, work.queued_s)
            if work.exchange is not None:
                meeting.arrive(self.rank, work.exchange, self.ends[stream])
            work.has_arrived = True
        if work.exchange is not None:
            end_s = meeting.ended_s.get(work.exchange[:2])
            if end_s is None:
                return False
            self.ends[stream] = max(self.ends[stream], end_s)
        self.ends[stream] += work.duration_s
        if work.moment is not None:
            self.reached_s[work.moment] = self.ends[stream]
        return True


STEP_PAIRS = 2.0**20
"""Pairs of tokens in a rank's step, if all attend to one another."""


def draw_attended(row: int, steps: int) -> list[float]:
    """Return the fraction of the pairs of tokens that attend to one another, in each step of a data-parallel rank. Half
    of its samples are one document, and the others are filled with documents a fiftieth as long."""
    source = random.Random(f"documents of {row}")
    return [fmean(source.choice((1.0, 1 / 50)) for _ in range(2 * MICRO_BATCH)) for _ in range(steps)]


class Meeting:
    """Exchanges: they start when the last rank arrives."""

    def __init__(self, costs: ChipCosts):
        self.costs = costs
        self.arrived: defaultdict[Any, dict[int, tuple[float, int]]] = defaultdict(dict)
        """Exchange -> rank -> time of arrival, and bytes."""
        self.ended_s: dict[Any, float] = {}
        self.largest: dict[tuple[int, ...], tuple[float, str]] = {}
        """Ranks -> bytes and kind of their largest exchange."""

    def arrive(self, rank: int, exchange: tuple[Any, ...], at_s: float) -> None:
        place, number, kind, ranks, nbytes = exchange
        arrived = self.arrived[place, number]
        arrived[rank] = at_s, nbytes
        if len(arrived) == len(set(ranks)):
            begun_s, nbytes = map(max, zip(*arrived.values(), strict=True))
            del self.arrived[place, number]
            members = sorted(set(ranks))
            self.ended_s[place, number] = begun_s + self.costs.disturbed_exchange_s(
                kind, members, nbytes, begun_s, f"{number} of {place}"
            )
            if len(members) > 1:
                self.largest[tuple(members)] = max(self.largest.get(tuple(members), (0.0, "")), (float(nbytes), kind))


def replay(recorded: Sequence[Mapping[str, Any]], layout: str, settings: str, steps: int) -> RunEvidence:
    _, axes, node_ranks = LAYOUTS[layout]
    world_size = len(recorded)
    read = read_settings(settings)
    costs = costs_of(read, {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(node_ranks)})
    assert costs is not None
    gc.disable()  # a replay makes many small objects, and no cycles
    meeting = Meeting(costs)
    # Ranks have allocations only if they may need a retry.
    left_out = {"allocate"} - {"allocate" for one in read.disturbances if one.retry_ms}
    recorded = [
        {**one, "actions": [action for action in one["actions"] if action[0] not in left_out]} for one in recorded
    ]
    launch_s = (read.launch_us or 0.0) / 1e6
    stage = world_size // Layout(**axes).pp
    rows = [rank % stage // Layout(**axes).tp for rank in range(world_size)]
    attended = [draw_attended(row, steps) for row in range(1 + max(rows))]
    ranks = [
        Rank(number, one, replace(costs, rank=number, sources={}), launch_s, attended=attended[rows[number]])
        for number, one in enumerate(recorded)
    ]
    hosts: list[Iterator[int] | None] = [rank.host(steps, meeting) for rank in ranks]
    awaited: list[int | None] = [None] * world_size
    while any(hosts):
        is_moving = False
        for number, (rank, host) in enumerate(zip(ranks, hosts, strict=True)):
            if host is None:
                continue
            is_moving |= rank.progress(meeting)
            if awaited[number] is not None and awaited[number] not in rank.reached_s:
                continue
            awaited[number] = next(host, None)
            is_moving = True
            if awaited[number] is None:
                hosts[number] = None
        assert is_moving, "the ranks wait for one another"
    series = {name: np.array([[step[name] for step in rank.steps] for rank in ranks]).T for name in ranks[0].steps[0]}
    shape = series["forward"].shape
    counters = {name: np.zeros(shape) for name in COUNTERS if name not in ("cpu_s", "rss_bytes", "swap_bytes")}
    counters |= {"host_queued_s": np.zeros(shape), "agreed_s": series["agreed_s"], "starved_s": series["starved_s"]}
    links = links_of(Layout(**axes))
    meeting.largest = {ranks: largest for ranks, largest in meeting.largest.items() if ranks in links}
    counters["allocator_retries"] = np.array(
        [[float(rank.retries[step]) for rank in ranks] for step in range(shape[0])]
    )
    counters["attended"] = np.array([rank.attended for rank in ranks]).T * STEP_PAIRS
    return RunEvidence(
        steps=np.arange(1, shape[0] + 1),
        parts_s={name: series[name] for name in PARTS},
        counters=counters,
        nodes=tuple(rank // node_ranks for rank in range(world_size)),
        kinds=tuple(rank // stage for rank in range(world_size)),
        link_changes=tuple(_sampled(meeting, series)),
    )


def links_of(layout: Layout) -> set[tuple[int, ...]]:
    """Return the ranks of each link that the engine samples: those of an axis, and neighbours in a pipeline."""
    grid = np.arange(layout.world_size).reshape(layout.pp, layout.data_parallel_size, layout.tp)
    found = [*grid.reshape(-1, layout.tp), *grid.swapaxes(1, 2).reshape(-1, layout.data_parallel_size)]
    found += list(np.stack([grid[:-1], grid[1:]], axis=-1).reshape(-1, 2))
    found += list(grid.reshape(-1, layout.ep)) if layout.ep > 1 else []
    return {tuple(sorted(ranks.tolist())) for ranks in found}


def _sampled(meeting: Meeting, series: Mapping[str, np.ndarray]) -> Iterator[LinkEvent]:
    """Yield the changes of links that samples show."""
    step_s = sum(series[name] for name in PARTS)[:, 0]
    begins = np.concatenate([[0.0], np.cumsum(step_s)])
    for number, (ranks, (nbytes, kind)) in enumerate(sorted(meeting.largest.items())):
        links = AxisLinks(f"axis{number}", [ranks], 0.1)
        for step in range(SAMPLED_STEPS, len(step_s), SAMPLED_STEPS):
            name = f"sample {step} of {ranks}"
            seconds = meeting.costs.disturbed_exchange_s(kind, ranks, nbytes, float(begins[step]), name)
            change = links.note(step, [[Transfer(nbytes, seconds, 0.0)] * len(ranks)])
            if change is not None:
                yield LinkEvent(
                    step=step, since_step=change.since_step, axis=links.axis, ranks=change.ranks,
                    before_bytes_per_s=change.before_bytes_per_s, now_bytes_per_s=change.now_bytes_per_s,
                )  # fmt: skip


# The matrix


DIAGNOSED_STEPS = 10
"""Steps between two diagnoses of a healthy run."""


def settings_of(one: Disturbed, base: str, from_s: float, step_s: float, steps: int) -> str:
    """Return the device's settings for a run with one disturbance, which lasts to the end."""
    if one.cause == "uneven_lengths":  # documents are as they are from the first step
        return f"{base};{one.settings}"
    if "slow_every_s" not in one.settings:
        return f"{base};{one.settings},slow_from_s={from_s:.3f}"
    every_s = 4 * step_s
    return f"{base};{one.settings},slow_from_s={from_s:.3f},slow_until_s={from_s + 0.75 * every_s:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for recorded steps and replays, used again later")
    parser.add_argument("--record", help="record this layout in this process, a rank")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--cases", type=int, default=30, help="of each cause")
    parser.add_argument("--first", type=int, default=0, help="number of the first case; others draw other disturbances")
    parser.add_argument("--healthy", type=int, default=10_000, help="steps")
    options = parser.parse_args()
    if options.record:
        print(json.dumps(record(options.record)), flush=True)
        os._exit(0)  # gloo's threads may abort a process
    options.out.mkdir(exist_ok=True)
    os.chdir(options.out)
    Path("conf/accelerator").mkdir(parents=True, exist_ok=True)
    Path("conf/accelerator/bench.yaml").write_text(CHIP)
    layouts = options.layouts.split(",")
    recorded = {layout: record_all(layout, options.out) for layout in layouts}
    sizes = {}
    steps_s = {}
    for layout in layouts:
        evidence = replay(recorded[layout], layout, BASE.replace("launch_us=400", "launch_us=0"), 12)
        steps_s[layout] = float(sum(evidence.parts_s[name][6, 0] for name in PARTS))
        for rank, one in enumerate(recorded[layout]):
            for name in ("forward", "backward", "optimizer", "exposed_comm"):
                replayed_s = float(evidence.parts_s[name][9, rank])
                if abs(replayed_s - one["parts_s"][name]) > 1e-3 * steps_s[layout]:
                    print(
                        f"{layout} rank {rank} {name}: replayed {replayed_s:.6f}, recorded {one['parts_s'][name]:.6f}"
                    )
        slower = (BASE.replace("link_slowness=500", "link_slowness=1000"), f"{BASE};link_delay_us=1000")
        longer_s = [_step_s(replay(recorded[layout], layout, one, 12)) for one in (BASE, *slower)]
        transfer_s = longer_s[1] - longer_s[0]
        delays = (longer_s[2] - longer_s[0]) / 1e-3
        attention_s = sum(action[2] for action in recorded[layout][0]["actions"] if action[3:4] == ["attention"])
        sizes[layout] = {
            "step_s": longer_s[0], "transfer_s": transfer_s, "delays": delays, "attention_s": attention_s,
        }  # fmt: skip
        print(
            f"{layout}: a step takes {longer_s[0]:.3f} s, {transfer_s:.3f} s of transfers; {delays:.0f} delays",
            flush=True,
        )
    print_matrix(recorded, sizes, range(options.first, options.first + options.cases))
    if options.healthy:
        print_healthy(recorded, options.healthy)


def _step_s(evidence: RunEvidence) -> float:
    return float(sum(evidence.parts_s[name][8, 0] for name in PARTS))


def replay_once(
    file: Path, recorded: Sequence[Mapping[str, Any]], layout: str, settings: str, steps: int
) -> RunEvidence:
    """Return the evidence of a replay, from a file of an earlier call if that replayed the same."""
    if file.exists():
        known, evidence = pickle.loads(file.read_bytes())
        if known == [layout, settings, steps]:
            return cast(RunEvidence, evidence)
    evidence = replay(recorded, layout, settings, steps)
    file.write_bytes(pickle.dumps(([layout, settings, steps], evidence)))
    return evidence


def print_matrix(recorded: Mapping[str, Any], sizes: Mapping[str, Mapping[str, float]], cases: range) -> None:
    counts: dict[str, Counter[bool]] = {}
    for cause in CAUSES:
        for index in cases:
            source = random.Random(f"{cause}/{index}")
            layout = list(recorded)[index % len(recorded)]
            one = None
            while one is None:
                one = draw(source, cause, layout, node_ranks=LAYOUTS[layout][2], **sizes[layout])
                if one is None:  # not on one node
                    layout = source.choice([name for name in recorded if nodes_of(name) > 1])
            one = replace(one, node_ranks=LAYOUTS[layout][2])
            step_s = sizes[layout]["step_s"]
            jitter = source.uniform(0.02, 0.05)
            base = f"{BASE},jitter={jitter:.3f},link_jitter={jitter:.3f}"
            settings = settings_of(one, base, HEALTHY_STEPS * step_s, step_s, one.steps)
            given = recorded[layout], layout, settings, HEALTHY_STEPS + one.steps + 3
            verdicts = conclude(replay_once(Path(f"{cause}-{index}.pickle"), *given))
            is_right = judge(one, verdicts)
            counts.setdefault(cause, Counter())[is_right] += 1
            if not is_right:
                print(
                    f"{cause} {index} {layout} {one.settings}: {[brief(verdict) for verdict in verdicts]}", flush=True
                )
    for name, counted in counts.items():
        print(f"{name}: {counted[True]} of {counted.total()}")
    print(f"all: {sum(one[True] for one in counts.values())} of {sum(one.total() for one in counts.values())}")


def print_healthy(recorded: Mapping[str, Any], steps: int) -> None:
    """Print what the supervisor's diagnosis reports of healthy steps, and how often the scheduler changes shares."""
    alarms: list[dict[str, Any]] = []
    links = 0
    changes = 0
    made = 0
    for layout in recorded:
        began_s = time.monotonic()
        given = recorded[layout], layout, f"{BASE},jitter=0.03,link_jitter=0.03", steps // len(recorded)
        evidence = replay_once(Path(f"healthy-{layout}.pickle"), *given)
        found = list(find_alarms(evidence))
        of_scheduler = count_changes(evidence, layout)
        alarms += found
        changes += of_scheduler
        links += len(evidence.link_changes)
        made += len(evidence.steps)
        print(f"{len(evidence.steps)} healthy steps of {layout}: {found}, {of_scheduler} changes of shares, "
              f"{len(evidence.link_changes)} of links; {time.monotonic() - began_s:.0f} s", flush=True)  # fmt: skip
    print(f"{made} healthy steps: {len(alarms)} alarms, {changes} changes of shares, {links} changes of links")


def find_alarms(evidence: RunEvidence) -> Iterator[dict[str, Any]]:
    """Yield the verdicts that are reported in the course of a run: those that two diagnoses in a row have found in the
    last `REMEMBERED_STEPS` steps, and that still hold (reporter/diagnosis/watch.py)."""
    before: set[tuple[object, ...]] = set()
    reported: set[tuple[object, ...]] = set()
    for end in range(DIAGNOSED_STEPS, len(evidence.steps) + 1, DIAGNOSED_STEPS):
        last = np.arange(len(evidence.steps)) < end
        last[: max(0, end - REMEMBERED_STEPS)] = False
        going_on = {
            one.place: one
            for one in conclude(part_of(evidence, last))
            if one.cause != "as_planned" and one.until_step is None
        }
        for place in (set(going_on) & before) - reported:
            yield {"step": int(evidence.steps[end - 1]), **brief(going_on[place])}
        reported = (reported | (set(going_on) & before)) & set(going_on)
        before = set(going_on)


def count_changes(evidence: RunEvidence, name: str) -> int:
    """Return how often the live scheduler changes the shares, given the times that the ranks have measured."""
    family, axes, _ = LAYOUTS[name]
    layout = Layout(**axes)
    rows = data_rows(layout)
    micro_batches = build_plan(Case(family, layout, micro_batch_size=MICRO_BATCH), "cpu").grad_accum_steps
    samples = micro_batches * MICRO_BATCH * len(rows)
    change = SchedulerSpec().change
    trackers = [SpeedTracker(change, SETTLING_S) for _ in range(evidence.ranks)]
    even = even_division(layout, MICRO_BATCH, keeps_micro_batches=False)
    scheduler = ShareScheduler(even, 4 * MICRO_BATCH, change)
    compute_s = evidence.part("forward", "backward")
    waited_s = evidence.parts_s["exposed_comm"]
    updates_s = evidence.parts_s["optimizer"] * counts_updates(layout, even)
    changes = 0
    for step in range(len(evidence.steps)):
        share = samples // len(rows)
        speeds = [slowest([trackers[rank].estimate for rank in row], share) for row in rows]
        for rank, tracker in enumerate(trackers):
            tracker.note(share, micro_batches, *(float(one[step, rank]) for one in (compute_s, waited_s, updates_s)))
        each_s = exchange_each_s(layout, float(waited_s[step].min()) / micro_batches)
        if scheduler.note_step(samples, speeds, each_s, 1, 0.0) is not None:
            changes += 1
            scheduler.follow(even)
    return changes


if __name__ == "__main__":
    main()
