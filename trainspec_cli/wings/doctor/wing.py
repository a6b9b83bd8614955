"""Examine nodes and fabrics, alone and before a run."""

from trainspec_cli.core.wings import Command, Wing

WING = Wing(
    commands={
        "doctor": Command(
            "clusters",
            "check that this node, or each of a Slurm job, is fit to train",
        ),
        "fabric": Command(
            "clusters",
            "discover how GPUs, NICs and nodes are joined, as tiers that a plan takes",
            takes_keys=True,
        ),
    },
    parts={"check_nodes": "trainspec_cli.wings.doctor.check_nodes:check_nodes"},
)
