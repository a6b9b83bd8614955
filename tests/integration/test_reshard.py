"""A run continues in another layout with the losses of an uninterrupted run."""

import pytest

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

RECIPE = ("recipe=tiny", "optim.schedule.kind=constant", "precision=fp32", "batching.global_batch_size=12")
ONE = ("cluster.devices_per_node=1", "layout.dp_replicate=1", "layout.dp_shard=1", "layout.tp=1", "layout.pp=1")
CHANGES = {
    4: ("cluster.devices_per_node=4", "layout.dp_replicate=1", "layout.dp_shard=4", "layout.tp=1", "layout.pp=1"),
    8: ("cluster.devices_per_node=4", "layout.dp_replicate=1", "layout.dp_shard=1", "layout.tp=2", "layout.pp=2"),
    12: ("cluster.devices_per_node=3", "layout.dp_replicate=1", "layout.dp_shard=3", "layout.tp=1", "layout.pp=1"),
    16: ONE,
}
"""Until this step in this layout."""


def losses(folder) -> list[float]:
    """The losses of all starts by step; no step is missing."""
    events = [event for event in read_events(RunDir(folder).events(0)) if event["type"] == "step"]
    assert [event["step"] for event in events] == list(range(1, len(events) + 1))
    return [event["loss"] for event in events]


@pytest.mark.slow
def test_the_losses_go_on_as_if_nothing_had_changed(trainspec, tmp_path):
    ended = trainspec("launch", *RECIPE, "run.dir=alone", "train.max_steps=16", *ONE)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for last, layout in CHANGES.items():
        start = ("launch", *RECIPE, "run.dir=moved") if last == 4 else ("resume", "moved")
        ended = trainspec(*start, *layout, f"train.max_steps={last}")
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
