"""The bench of a GPU continues after an ended call or a failed item; its checks are stand-ins here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest
from bench.gpu.allocations import events_of, replay
from bench.gpu.record import ItemFailed, Items, OutOfTime, read_json
from bench.gpu.schedule import GOES_ON_ANEW, OUT_OF_TIME, Check, Schedule
from bench.gpu.wheels import needs_of
from lab.waiting import PATIENCE_S, wait_for

TESTS = Path(__file__).parent
ONE_CHECK = """
    import sys, time
    sys.path.insert(0, {tests!r})
    from pathlib import Path
    from bench.gpu.record import ItemFailed, Items, OutOfTime, read_json
    file = Path({folder!r}) / "running.json"
    items = Items(file, {name!r}, time.monotonic() + {left_s}, read_json(file)["found"])
    def note(what):
        with Path({folder!r}, "order").open("a") as stream: stream.write(what + "\\n")
    try:
        {body}
    except ItemFailed:
        sys.exit(75)
    except OutOfTime:
        sys.exit(76)
"""


def schedule_of(folder: Path, bodies: dict[str, str], limit_s: float = 60.0) -> Schedule:
    """`bodies`: check -> the Python code of its process, which finds its items."""

    def command(check: Check, left_s: float) -> list[str]:
        body = textwrap.indent(textwrap.dedent(bodies[check.name]), " " * 4).strip()
        values = {"tests": str(TESTS), "folder": str(folder), "name": check.name, "left_s": left_s, "body": body}
        return [sys.executable, "-c", textwrap.dedent(ONE_CHECK).format(**values)]

    checks = [Check(name, "a stand-in", lambda: None, limit_s, least_s=1.0) for name in bodies]
    return Schedule(checks, folder, command)


def found_in(folder: Path) -> dict[str, dict[str, object]]:
    checks = json.loads((folder / "results.json").read_text())["checks"]
    return {name: {"state": record["state"], **record["found"]} for name, record in checks.items()}


def test_an_item_that_fails_is_recorded_and_the_others_are_found(tmp_path: Path) -> None:
    bodies = {
        "first": """
            items.take("good", lambda: 1)
            items.take("bad", lambda: 1 / 0)
            items.take("after", lambda: 3)
        """,
        "crash": """
            import os
            items.take("killed", lambda: os.kill(os.getpid(), 9))
            items.take("next", lambda: 4)
        """,
        "broken": "raise SystemExit('no such thing')",
        "last": "items.take('one', lambda: 5)",
    }
    assert schedule_of(tmp_path, bodies).run(120)
    found = found_in(tmp_path)
    assert found["first"].pop("bad")["error"].splitlines()[-1].startswith("ZeroDivisionError: ")  # type: ignore[index]
    assert found["crash"].pop("killed")["error"].startswith("the process ended with -9")  # type: ignore[index]
    assert found == {
        "first": {"state": "done", "good": 1, "after": 3},
        "crash": {"state": "done", "next": 4},
        "broken": {"state": "failed"},
        "last": {"state": "done", "one": 5},
    }
    assert "no such thing" in json.loads((tmp_path / "results.json").read_text())["checks"]["broken"]["error"]


def test_a_call_goes_on_with_the_items_that_the_last_one_had_no_time_for(tmp_path: Path) -> None:
    body = """
        items.take("first", lambda: note("first"))
        items.take("second", lambda: note("second"), least_s=LEAST)
    """
    assert not schedule_of(tmp_path, {"check": body.replace("LEAST", "1e6")}).run(30)
    assert found_in(tmp_path) == {"check": {"state": "cut", "first": None}}
    assert schedule_of(tmp_path, {"check": body.replace("LEAST", "0")}).run(30)
    assert found_in(tmp_path)["check"]["state"] == "done"
    assert (tmp_path / "order").read_text() == "first\nsecond\n", "what was found is not looked for again"
    assert schedule_of(tmp_path, {"check": "note('third')"}).run(30)
    assert (tmp_path / "order").read_text() == "first\nsecond\n", "neither is what is done"


@pytest.mark.slow
def test_a_check_ends_at_its_own_limit_and_is_not_repeated(tmp_path: Path) -> None:
    bodies = {"endless": "items.take('one', lambda: 1)\nitems.take('never', lambda: time.sleep(600))"}
    assert schedule_of(tmp_path, bodies, limit_s=5).run(PATIENCE_S)
    assert found_in(tmp_path) == {"endless": {"state": "limit", "one": 1}}


@pytest.mark.slow
def test_a_killed_call_leaves_what_it_had_and_the_next_one_takes_it_up(tmp_path: Path) -> None:
    body = """
        items.take("before", lambda: note("before"))
        items.take("long", lambda: (note("long"), time.sleep(600))[0] if not Path(FOLDER, "short").exists() else 7)
        items.take("after", lambda: 8)
    """.replace("FOLDER", repr(str(tmp_path)))
    calling = f"""
        import sys
        sys.path.insert(0, {str(TESTS)!r})
        from pathlib import Path
        from test_gpu_bench import schedule_of
        schedule_of(Path({str(tmp_path)!r}), {{"check": {body!r}}}, limit_s=900).run(900)
    """
    call = subprocess.Popen([sys.executable, "-c", textwrap.dedent(calling)], start_new_session=True, text=True)
    try:
        order = tmp_path / "order"
        wait_for(lambda: order.is_file() and "long" in order.read_text(), call)
    finally:
        os.killpg(call.pid, signal.SIGKILL)
        call.wait()
    assert read_json(tmp_path / "running.json")["found"] == {"before": None}
    (tmp_path / "short").touch()
    assert schedule_of(tmp_path, {"check": body}).run(60)
    assert found_in(tmp_path) == {"check": {"state": "done", "before": None, "long": 7, "after": 8}}
    assert (tmp_path / "order").read_text() == "before\nlong\n"


def test_an_item_in_which_calls_are_killed_again_and_again_counts_as_failed(tmp_path: Path) -> None:
    left = {"check": "check", "item": "deadly", "found": {"before": 1}}
    for _ in range(2):
        (tmp_path / "running.json").write_text(json.dumps(left))
        schedule = schedule_of(tmp_path, {"check": "items.take('deadly', lambda: 2)\nitems.take('after', lambda: 3)"})
    assert schedule.run(60)
    assert found_in(tmp_path) == {
        "check": {"state": "done", "before": 1, "deadly": {"error": "calls were killed while this ran"}, "after": 3}
    }


def test_items_are_taken_once_and_in_time(tmp_path: Path) -> None:
    items = Items(tmp_path / "running.json", "check", time.monotonic() + 100)
    items.take("one", lambda: 1)
    items.take("one", lambda: 2)
    with pytest.raises(OutOfTime):
        items.take("two", lambda: 2, least_s=200)
    with pytest.raises(ItemFailed):
        items.take("three", lambda: [][0])
    assert items.found["one"] == 1 and "two" not in items.found
    assert read_json(tmp_path / "running.json")["found"] == items.found
    assert (GOES_ON_ANEW, OUT_OF_TIME) == (75, 76), "as the stand-ins above exit"


# The allocator's history


def test_the_allocators_history_becomes_events_that_the_planners_model_takes() -> None:
    """Entries as `torch.cuda.memory._snapshot` lists them; earlier allocations have no number."""
    history = [
        {"action": "free_completed", "addr": 1, "size": 512},
        {"action": "segment_alloc", "addr": 100, "size": 2**21},
        {"action": "alloc", "addr": 100, "size": 1000},
        {"action": "alloc", "addr": 2000, "size": 5 * 2**20},
        {"action": "free_requested", "addr": 100, "size": 1000},
        {"action": "free_completed", "addr": 100, "size": 1000},
        {"action": "alloc", "addr": 100, "size": 700},
    ]
    events = events_of(history)
    assert events == [1000, 5 * 2**20, -1, 700]
    assert replay(events) == {"events": 4, "allocated_bytes": 5 * 2**20 + 1024, "reserved_bytes": 22 * 2**20}


def test_a_wheel_tells_what_it_needs_on_linux(tmp_path: Path) -> None:
    asked = [
        "numpy>=1",
        "colorama; sys_platform == 'win32'",
        "tomli; python_version < '3.11'",
        "pytest; extra == 'dev'",
    ]
    with zipfile.ZipFile(tmp_path / "own-1.0-py3-none-any.whl", "w") as archive:
        lines = ["Metadata-Version: 2.1", "Name: own", "Version: 1.0", *(f"Requires-Dist: {one}" for one in asked)]
        archive.writestr("own-1.0.dist-info/METADATA", "\n".join(lines) + "\n")
    assert [str(need) for need in needs_of(tmp_path / "own-1.0-py3-none-any.whl", "3.12")] == ["numpy>=1"]
