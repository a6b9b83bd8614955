from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lab.problems import raises

from trainspec_cli.core.environment_names import GENERATION
from trainspec_cli.core.errors import RecipeError, WorkerError
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.generations import Fence, GenerationRecord
from trainspec_cli.run.folder.paths import RunDir


def test_every_start_gets_the_next_number(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert generations.newest(run) == 0
    assert [generations.begin(run) for _ in range(3)] == [1, 2, 3]
    assert generations.newest(run) == 3


@pytest.mark.clause("LAUNCH-5")
def test_starts_at_the_same_time_get_numbers_of_their_own(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: generations.begin(run), range(40)))
    assert sorted(numbers) == list(range(1, 41))


def test_what_a_start_tells_of_itself_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert generations.read(run, 1) is None
    number = generations.begin(run)
    assert generations.read(run, number) is None
    record = GenerationRecord(
        *(number, 12.5, "node1.site", "node1", 4000, {"ADDRESS": "node1:4001"}, 2, "id", "logs", ("-m", "engine"), ())
    )
    generations.describe(run, record)
    assert generations.read(run, number) == record
    run.generation(number).write_text('{"head": 5}')
    with pytest.raises(RecipeError, match="head"):
        generations.read(run, number)


def test_a_node_has_the_place_that_a_start_gives_it() -> None:
    whole = GenerationRecord(1, 0.0, "a", "a", 1, {}, 3, "id", "logs", (), ())
    assert [whole.place_of(node) for node in range(3)] == [0, 1, 2]
    without = GenerationRecord(2, 0.0, "a", "a", 1, {}, 2, "id", "logs", (), (), (0, 2, 1))
    assert [without.place_of(node) for node in range(3)] == [0, 2, 1]


@pytest.mark.clause("LAUNCH-5")
def test_an_older_start_is_fenced_off(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    fence = Fence(run, generations.begin(run))
    fence.check()
    generations.begin(run)
    assert fence.is_closed()
    with raises(WorkerError, generations.FENCED, "start 2 owns", "this start, 1,"):
        fence.check()


def test_often_written_things_look_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = RunDir(tmp_path), [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    fence = Fence(run, generations.begin(run))
    fence.check_now_and_then()
    generations.begin(run)
    fence.check_now_and_then()
    now[0] += generations.CHECK_INTERVAL_S
    with pytest.raises(WorkerError):
        fence.check_now_and_then()


def test_a_worker_that_no_launch_started_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GENERATION, raising=False)
    generations.begin(RunDir(tmp_path))
    Fence.of_worker(RunDir(tmp_path)).check()
