"""Compare what `trainspec diagnose RUN --json` says with what was injected, by cause and place alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .cases import MECHANISMS, Case, Injection

AS_PLANNED, NOISE, NOTHING = "as_planned", "noise", "(none)"
Verdict = Mapping[str, Any]


@dataclass(frozen=True)
class Judgement:
    cause: str
    """Of the heaviest verdict, `(none)` where there was none."""
    exact: bool
    """The heaviest verdict has the cause and the place of the injection; of two, both are among the verdicts; of a
    healthy run, nothing is said but `as_planned`."""
    right_cause: bool
    """As `exact`, whatever the place."""
    extra: int
    """Verdicts that name what was not injected, `as_planned` and `noise` apart."""
    earlier: int
    """Verdicts on steps that were over before the injection began; they take no part in the other figures."""
    since_error: int | None
    """Steps between the heaviest verdict's `since_step` and the first step disturbed; None where it is not exact."""


def judge(case: Case, verdicts: Sequence[Verdict], first_step: int) -> Judgement:
    """`first_step`: the first that was disturbed."""
    begun = [verdict for verdict in verdicts if _goes_on(verdict, first_step)]
    earlier, verdicts = len(verdicts) - len(begun), begun
    told = [verdict for verdict in verdicts if verdict["cause"] != AS_PLANNED]
    heaviest = verdicts[0]["cause"] if verdicts else NOTHING
    extra = sum(not _is_known(case, verdict) for verdict in told if verdict["cause"] != NOISE)
    if not case.injections:
        return Judgement(told[0]["cause"] if told else heaviest, not told, not told, extra, earlier, None)
    heard = told if len(case.injections) > 1 else told[:1]
    exact = all(any(names(case, one, verdict) for verdict in heard) for one in case.injections)
    right = all(any(one.cause == verdict["cause"] for verdict in heard) for one in case.injections)
    since = heard[0].get("since_step") if exact else None
    return Judgement(heaviest, exact, right, extra, earlier, None if since is None else int(since) - first_step)


def names(case: Case, injection: Injection, verdict: Verdict) -> bool:
    """Return whether a verdict has the injection's cause and place."""
    return verdict["cause"] == injection.cause and _is_place(case, injection, verdict)


def _goes_on(verdict: Verdict, step: int) -> bool:
    return verdict.get("until_step") is None or int(verdict["until_step"]) >= step


def _is_known(case: Case, verdict: Verdict) -> bool:
    return any(names(case, injection, verdict) for injection in case.injections)


def _is_place(case: Case, injection: Injection, verdict: Verdict) -> bool:
    match MECHANISMS[injection.mechanism].place:
        case "run":
            return True
        case "rank":
            return _whole(verdict.get("rank")) == injection.rank
        case "stage":
            assert injection.stage is not None
            return _whole(verdict.get("rank")) in case.ranks_of_stage(injection.stage)
        case "node":
            return _node(verdict.get("node")) == injection.node
        case "link":
            return _is_link(case, injection, verdict)


def _is_link(case: Case, injection: Injection, verdict: Verdict) -> bool:
    """The link leads to the node, whichever of its ranks is named. Two nodes have one link, which needs no name."""
    ends = _ends(case, verdict.get("link")) or [_node(verdict.get("node"))]
    if case.nodes == 2:
        return verdict.get("link") is not None or ends[0] is not None
    return injection.node in ends and None not in ends and len(set(ends)) in (1, 2)


def _ends(case: Case, link: object) -> list[int | None]:
    """Return the nodes of a link that is named by its ranks, or by its nodes' names (`node1-node2`)."""
    text = str(link if link is not None else "")
    if by_name := re.findall(r"node\s*(\d+)", text):
        return [int(number) - 1 for number in by_name]
    return [case.node_of(int(number)) for number in re.findall(r"\d+", text)]


def _node(value: object) -> int | None:
    """Return a node's place from its number or its host's name, which counts from 1."""
    text = str(value)
    if found := re.fullmatch(r"node(\d+)", text):
        return int(found[1]) - 1
    return _whole(value)


def _whole(value: object) -> int | None:
    return int(str(value)) if re.fullmatch(r"\d+", str(value)) else None


def exhaustion_told(case: Case, verdicts: Sequence[Verdict], step: int) -> int | None:
    """Return the step at which a verdict that names the leak says that memory runs out: the last one that it speaks of
    and that lies behind `step`, in words or as a figure. None where it tells none."""
    leaks = [one for one in case.injections if one.mechanism == "leak"]
    told = [verdict for verdict in verdicts if any(names(case, one, verdict) for one in leaks)]
    numbers = re.findall(r"step\S*[\s:=~]+(?:about )?([\d,]+)", json.dumps(told).replace('"', ""))
    steps = [int(number.replace(",", "")) for number in numbers if number.strip(",")]
    return max((one for one in steps if one > step), default=None)


def says(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    """Return of each verdict what a reader of the results needs to see what went wrong."""
    kept = (
        "cause",
        "rank",
        "node",
        "link",
        "since_step",
        "until_step",
        "full_step",
        "cost_s",
        "confidence",
        "evidence",
    )
    return [{key: verdict[key] for key in kept if verdict.get(key) is not None} for verdict in verdicts]
