"""Every type of event is written and read back whole, and a damaged one is noticed."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

import pytest
from lab.events import LEFT_OUT, LEFT_OUT_ACHIEVED, MEMORY

from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.records import ABSENT, FieldError, to_plain
from trainspec_cli.recipe.results.doctor import NodeFault
from trainspec_cli.recipe.results.verdict import CodeLine, Collective, Look, LookOrder, OperationTime, RunVerdict
from trainspec_cli.run.folder.event_types.events import (
    EVENT_TYPES,
    AchievedEvent,
    BucketsEvent,
    BucketTry,
    CadenceEvent,
    CheckpointEvent,
    ConnectionCounts,
    CountersEvent,
    DirectiveEvent,
    EndedMark,
    EndEvent,
    EvalEvent,
    Event,
    FailureMark,
    FirstTextEvent,
    HangEvent,
    LaunchMark,
    LinkEvent,
    LinkRate,
    LinksEvent,
    LookEvent,
    NodeCheckedEvent,
    NodeFaultEvent,
    RecoveryEvent,
    RetryEvent,
    SampleEvent,
    SetFigures,
    StallEvent,
    StartEvent,
    StepEvent,
    TextPart,
    UnknownEvent,
    UsageEvent,
    VerdictEvent,
    WarningEvent,
    parse_event,
)
from trainspec_cli.run.folder.events import EventWriter, read_log

START = StartEvent(
    step=3,
    world_size=2,
    device_name="a chip",
    is_accelerator=True,
    params=10,
    adapter_params=3,
    peak_flops=1e9,
    peak_source="measured",
    flops_per_token=60.0,
    unit="samples",
    restored_from="checkpoints/step_00000003",
    pid=7,
    host="h",
    startup_s={"import": 0.0, "join": 0.5},
)
STEP = StepEvent(
    step=4,
    loss=2.5,
    grad_norm=0.5,
    lr=1e-3,
    tokens=64,
    samples=2,
    step_time_s=0.5,
    time_s={"forward": 0.25, "backward": 0.25},
    exchange_s=0.125,
    exposed_s=0.0625,
    queued_s=0.03125,
    noise_scale=12.75,
    skipped=True,
    h2d_copies=1,
    h2d_bytes=256,
    allocations=3,
    group=1,
    groups=(0, 1),
    took=(8, 2),
)
TEXT = EvalEvent(
    step=4,
    heldout_loss=2.0,
    heldout_bits_per_byte=None,
    xz_bits_per_byte=2.5,
    sets={"web": SetFigures(loss=1.0, bits_per_byte=2.0)},
    seconds=0.5,
)
IMAGES = EvalEvent(step=4, heldout_loss=2.0, heldout_accuracy=0.5, seconds=0.5)
CHECKPOINT = CheckpointEvent(step=4, path="p", bytes=9, seconds=0.1, written_s=0.2, waited_s=0.3)
CADENCE = CadenceEvent(
    step=4,
    interval_steps=10,
    blocked_s=0.1,
    drag_s=0.2,
    written_s=0.3,
    step_time_s=0.4,
    mtbf_s=5000.0,
    failures=1,
    observed_s=60.0,
)
ENTERED: dict[str, Any] = {
    "entered": (Collective(group="world", number=7, kind="gloo:all_reduce", sizes=((3, 5),), dtypes=("Float",)),),
    "late": (1,),
    "why": "it is in no collective",
}
HANG = HangEvent(
    step=4,
    waited_s=9.0,
    deadline_s=5.0,
    host="h",
    waiting=True,
    waits_in="gloo:all_reduce",
    collectives={"world": 7},
    stack="here",
    **ENTERED,
)
STALL = StallEvent(
    step=4,
    waited_s=2.5,
    usual_s=0.5,
    host="h",
    waiting=True,
    waits_in="gloo:all_reduce",
    collectives={"world": 7},
    stack="here",
    early=True,
    **ENTERED,
)
USAGE = UsageEvent(
    step=4, cores=1.5, rss_bytes=2**30, swap_bytes=0, available_bytes=2**33, gpu_busy=0.9, gpu_bytes=2**34
)
LOOK = LookEvent(
    step=9,
    look=Look(
        order=LookOrder(number=1, looker=1, cause="slow_device", rank=1),
        first_step=7,
        last_step=9,
        operations=(OperationTime(name="aten::mm", self_s=0.25, calls=12.0),),
        operations_share=0.5,
        lines=(CodeLine(file="f.py", line=3, function="f", text="x = 1", share=0.75),),
        samples=40,
        file="looks/0001.json",
    ),
)
CONNECTION = ConnectionCounts(
    local="10.0.0.1:7",
    peer="10.0.0.2:8",
    sent_bytes=4096,
    segments=40,
    resent=2,
    timeouts=1,
    busy_s=0.1,
    rtt_s=0.001,
)
COUNTERS = CountersEvent(
    samples=4,
    step=4,
    steps=2,
    wall_s=1.0,
    own_s=0.75,
    cpu_s=0.5,
    queued_s=0.125,
    throttled_s=0.25,
    steal_s=0.5,
    memory_stall_s=0.5,
    major_faults=3,
    gc_s=0.0625,
    starved_s=0.125,
    gc_runs=2,
    compiles=1,
    allocator_retries=5,
    rss_bytes=9,
    swap_bytes=8,
    available_bytes=7,
    tokens=64,
    attended=512,
    agreed_s=0.001,
    left_at=1.75e9,
    connections=(CONNECTION,),
)
VERDICT = RunVerdict(
    cause="slow_device",
    rank=1,
    node=0,
    link=(0, 1),
    since_step=3,
    until_step=9,
    cost_s=0.5,
    confidence=0.9,
    evidence=("it is slow",),
    advice="trainspec doctor",
    full_step=7,
)
RECOVERY = RecoveryEvent(step=4, change="left", group=1, stall_s=1.5, lost_steps=1)
DIRECTIVE = DirectiveEvent(
    step=4,
    number=1,
    applied=True,
    counts=(9, 5),
    micro_batch_size=16,
    micro_batches=1,
    reason="rank 1 is slow",
    before_s=2.0,
    expected_s=1.5,
    group=1,
)
RELAYOUT = replace(
    DIRECTIVE,
    kind="layout",
    before=Layout(),
    layout=Layout(pp=2),
    pause_s=0.3,
    moved_bytes=9,
    peak_bytes=12,
    largest_micro_batch_size=8,
    largest_stage_layers=None,
)
ACHIEVED = AchievedEvent(step=9, number=1, before_s=2.0, expected_s=1.5, achieved_s=1.6, group=1)
LINK = LinkRate(
    axis="dp_shard",
    ranks=(0, 1),
    links=2,
    bytes_per_s=1e9,
    noise=0.02,
    sent_bytes=4096.0,
    waited_s=0.01,
    last_rank=1,
    samples=9,
    planned_bytes_per_s=2e9,
)
LINK_CHANGE = LinkEvent(
    step=9,
    since_step=7,
    axis="dp_shard",
    ranks=(0, 1),
    before_bytes_per_s=1e9,
    now_bytes_per_s=5e8,
    changed_links=2,
    group=1,
)
EVENTS: list[Event] = [
    START,
    STEP,
    USAGE,
    replace(STEP, tokens=ABSENT, samples=ABSENT, steps=1),
    replace(STEP, tokens=ABSENT, groups=ABSENT, loss=None),
    TEXT,
    IMAGES,
    replace(IMAGES, heldout_accuracy=ABSENT, heldout_dice=0.5),
    CHECKPOINT,
    CADENCE,
    HANG,
    STALL,
    COUNTERS,
    VerdictEvent(step=9, is_over=False, verdict=VERDICT),
    RECOVERY,
    DIRECTIVE,
    RELAYOUT,
    ACHIEVED,
    BucketsEvent(step=9, layout="dp_shard=2", bucket_bytes=8, tries=(BucketTry(0, 0.5), BucketTry(8, 0.25)), group=1),
    replace(MEMORY, was_killed=True, lost_steps=2, used_bytes=9, limit_bytes=8, group=1),
    replace(LEFT_OUT, spare=4),
    LEFT_OUT_ACHIEVED,
    LinksEvent(step=9, links=(LINK, replace(LINK, planned_bytes_per_s=ABSENT)), group=1),
    LINK_CHANGE,
    SampleEvent(step=4, prompt="once", text=" upon"),
    FirstTextEvent(step=0, tokens=3, trained=1, parts=(TextPart(text="what?", trained=False),)),
    WarningEvent(step=4, message="hot"),
    RetryEvent(step=4),
    LOOK,
    EndEvent(step=4, status="done", weights_sha256="ab"),
    LaunchMark(),
    FailureMark(),
    NodeFaultEvent(host="node-7", fault=NodeFault("xid", "GPU 0000:3b:00", "Xid 79, the GPU has fallen off the bus")),
    NodeCheckedEvent(host="node-7"),
    EndedMark(exit_code=-9),
]
NAMES = [event.type for event in EVENTS]
OPTIONAL = {
    "nodes.reason": "slow",
    "start.is_accelerator": False,
    "start.unit": "tokens",
    "start.adapter_params": 0,
    "start.restored_from": None,
    "cadence.mtbf_s": None,
    "eval.seconds": 0.0,
    "end.weights_sha256": None,
    "directive.kind": "shares",
    "memory.kind": "memory",
    "nodes.kind": "nodes",
    "link.changed_links": 1,
    "memory.was_killed": False,
    "memory.lost_steps": 0,
    "ended.exit_code": None,
    "hang.entered": (),
    "stall.entered": (),
    "stall.early": False,
} | {f"{name}.rank": -1 for name in EVENT_TYPES}
"""Keys that an event need not have, and what their absence means; others are needed, or are `Absent`."""


def test_every_type_is_tried() -> None:
    assert {type(event) for event in EVENTS} == set(EVENT_TYPES.values())
    assert all(cls.__dataclass_fields__["type"].default == name for name, cls in EVENT_TYPES.items())
    for cls in EVENT_TYPES.values():
        tried = {
            field.name
            for event in EVENTS
            if type(event) is cls
            for field in fields(event)
            if getattr(event, field.name) is not ABSENT
        }
        assert tried == {field.name for field in fields(cls)}


@pytest.mark.parametrize("event", EVENTS, ids=NAMES)
def test_an_event_is_read_back_as_it_was_written(tmp_path: Any, event: Event) -> None:
    writer = EventWriter(tmp_path / "rank00002.jsonl", 2)
    writer.write(event)
    writer.close()
    (found,) = read_log(tmp_path / "rank00002.jsonl")
    assert type(found) is type(event)
    assert replace(found, time=0.0, rank=-1) == event
    assert found.rank == 2 and found.time > 1.7e9


@pytest.mark.parametrize("event", EVENTS, ids=NAMES)
def test_a_dropped_field_is_noticed(event: Event) -> None:
    """It is an error where readers count on it; else the event says that it is absent, or has its default."""
    plain = to_plain(event)
    absent = {name for name, hint in get_type_hints(type(event)).items() if type(ABSENT) in get_args(hint)}
    counted = {"tokens", "samples", "steps"} & plain.keys() if event.type == "step" else set()
    one_needed = counted if len(counted) == 1 else set()
    one_needed |= {"heldout_bits_per_byte", "heldout_accuracy", "heldout_dice"} & plain.keys()
    for key in plain:
        damaged = {name: value for name, value in plain.items() if name != key}
        if f"{event.type}.{key}" in OPTIONAL:
            assert parse_event(damaged) == replace(event, **{key: OPTIONAL[f"{event.type}.{key}"]})
        elif key in absent - one_needed:
            assert parse_event(damaged) == replace(event, **{key: ABSENT})
        else:
            with pytest.raises(FieldError, match=rf"has (no|none of) .*`{key}`"):
                parse_event(damaged)


@pytest.mark.clause("RUN-6")
@pytest.mark.parametrize("event", EVENTS, ids=NAMES)
def test_a_value_of_another_kind_is_refused_by_name(event: Event) -> None:
    plain = to_plain(event)
    for key in plain:
        for wrong in ({"a": "b"}, [["c"]]):
            with pytest.raises(FieldError, match=f"^`{key}` is (an? (object|list); |invalid: )"):
                parse_event({**plain, key: wrong})


@pytest.mark.parametrize(
    ("event", "key", "value"),
    [
        (STEP, "step", -1),
        (STEP, "step", 1.5),
        (STEP, "step", True),
        (STEP, "step", 10**18),
        (STEP, "step", None),
        (STEP, "skipped", 1),
        (STEP, "loss", 1e308),
        (STEP, "step_time_s", float("nan")),
        (STEP, "time_s", {"forward": None}),
        (STEP, "took", [8, -1]),
        (START, "world_size", 0),
        (START, "world_size", 10**7),
        (START, "peak_flops", -1.0),
        (START, "rank", -2),
        (TEXT, "sets", {"web": {"loss": 1.0}}),
        (HANG, "collectives", {"world": "x"}),
        (RECOVERY, "change", None),
    ],
)
def test_a_value_out_of_its_range_is_refused(event: Event, key: str, value: Any) -> None:
    with pytest.raises(FieldError, match=f"^`{key}` is "):
        parse_event({**to_plain(event), key: value})


def test_infinite_losses_of_earlier_versions_are_read() -> None:
    for number in ("NaN", "Infinity"):
        found = parse_event(json.loads(json.dumps(to_plain(STEP)).replace("2.5", number)))
        assert isinstance(found, StepEvent)


@pytest.mark.clause("RUN-6", "EXT-1")
def test_fields_and_types_of_a_later_version_are_passed_over() -> None:
    assert parse_event({**to_plain(STEP), "colour": {"deep": [1]}}) == STEP
    assert parse_event({"type": "eclipse", "time": 5, "rank": 1, "step": "x"}) == UnknownEvent(
        type="eclipse", time=5, rank=1
    )
    with pytest.raises(FieldError, match="`type` is 7;"):
        parse_event({"type": 7, "time": 5})


def test_a_field_that_is_absent_has_no_key_and_one_that_is_none_is_null() -> None:
    assert to_plain(IMAGES).keys() == {"type", "time", "rank", "step", "heldout_loss", "heldout_accuracy", "seconds"}
    assert to_plain(TEXT)["heldout_bits_per_byte"] is None
