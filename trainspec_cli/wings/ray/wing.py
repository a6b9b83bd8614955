"""Train on the nodes of a Ray cluster (`cluster.manager=ray`)."""

from trainspec_cli.core.wings import Wing

WING = Wing(
    parts={
        "packages": "trainspec_cli.wings.ray.rules:PACKAGES",
        "managers": "trainspec_cli.wings.ray.client:RAY_RUNS",
    },
)
