"""Examine nodes and fabrics, both on request and before a run."""

from trainspec_cli.core.wings import Command, Wing

WING = Wing(
    commands={
        "doctor": Command(
            "clusters",
            "check that this node, or each node of a Slurm job, can train",
        ),
        "fabric": Command(
            "clusters",
            "discover the links between GPUs, NICs and nodes, as tiers for plans",
            takes_keys=True,
        ),
    },
    parts={"check_nodes": "trainspec_cli.wings.doctor.examine:check_nodes"},
)
