"""A run on four emulated machines on which processes and whole machines are killed at random. The bench
(`python -m tests.bench.kills`) does this a hundred times; here are six faults whose kinds all differ."""

import pytest
from bench import kills
from lab.machines import lacking

SEED, FAULTS = 45, 6
"""The supervisor's machine off, two kills of workers in a row, an agent, a cable, the supervisor, a stopped worker."""


@pytest.mark.slow
def test_a_run_recovers_from_random_faults_and_loses_no_sample(tmp_path):
    if why := lacking():
        pytest.skip(why)
    assert len({kills.draw(SEED, number).kind for number in range(FAULTS)}) == FAULTS
    outcomes, wrong = kills.run(tmp_path, "restart", FAULTS, SEED)
    assert wrong == []
    assert [outcome.why for outcome in outcomes if not outcome.recovered] == []
    assert len(outcomes) == FAULTS
