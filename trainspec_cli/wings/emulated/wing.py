"""A software accelerator, and rehearsals of plans on this accelerator."""

from trainspec_cli.core.wings import Command, Wing

WING = Wing(
    commands={
        "rehearse": Command(
            "plan",
            "run steps of single ranks of a plan without GPUs, to see what fills their memory",
            takes_keys=True,
        ),
    },
    parts={"devices": "trainspec_cli.wings.emulated.engine.device:PLUGIN"},
)
