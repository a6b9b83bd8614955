"""What failures cost, from a run's story."""

from trainspec_cli.rundir.recoveries import read_recoveries


def step(number: int, time: float) -> dict:
    return {"type": "step", "step": number, "time": time, "step_time_s": 1.0}


def test_what_groups_cost_stands_in_the_story() -> None:
    left = {"type": "recovery", "time": 3.0, "change": "left", "group": 1, "step": 2, "stall_s": 1.2, "lost_steps": 1}
    assert read_recoveries([step(1, 1.0), left, step(2, 3.0)]) == [
        {"kind": "left", "group": 1, "step": 2, "stall_s": 1.2, "lost_steps": 1}
    ]


def test_a_restart_stalls_from_the_last_step_to_the_first_new_one() -> None:
    restart = {"type": "recovery", "change": "restart", "group": None, "step": 7, "stall_s": None, "lost_steps": 3}
    (recovery,) = read_recoveries([step(7, 100.0), restart | {"time": 101.0}, step(5, 121.0), step(6, 122.0)])
    assert recovery == {"kind": "restart", "group": None, "step": 7, "stall_s": 20.0, "lost_steps": 3}
