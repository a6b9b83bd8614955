"""A node that has failed repeatedly for one cause, and what does not count."""

from __future__ import annotations

from trainspec_cli.recipe.results.doctor import FaultCause, NodeFault
from trainspec_cli.run.recovery.reliability import repeated_faults


def failed(host: str, cause: FaultCause) -> tuple[str, NodeFault]:
    return host, NodeFault(cause, "GPU 3", "words")


def test_a_node_that_failed_twice_for_one_cause_is_named():
    events = [failed("a", "xid"), failed("b", "xid"), failed("b", "lost"), failed("b", "xid")]
    assert repeated_faults(events) == {"b": ("xid", 2)}


def test_what_the_program_may_have_caused_does_not_count():
    assert repeated_faults([failed("a", "program")] * 3 + [failed("a", "out_of_memory")] * 3) == {}


def test_a_node_that_has_passed_its_check_may_fail_twice_again():
    events = [failed("a", "lost"), failed("a", "lost"), ("a", None), failed("a", "lost")]
    assert repeated_faults(events) == {}
    assert repeated_faults([*events, failed("a", "lost")]) == {"a": ("lost", 2)}
