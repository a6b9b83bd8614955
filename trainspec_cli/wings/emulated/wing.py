"""The plug-in for a software accelerator, and for rehearsing plans on it."""

from trainspec_cli.core.wings import Command, Wing

WING = Wing(
    commands={
        "rehearse": Command(
            "plan",
            "run steps of individual ranks of a plan without GPUs, to see what fills their memory",
            takes_keys=True,
        ),
    },
    parts={"devices": "trainspec_cli.wings.emulated.engine.device:PLUGIN"},
)
