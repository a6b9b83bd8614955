"""Install and train without a network."""

from trainspec_cli.core.wings import Command, Wing

WING = Wing(
    commands={
        "bundle": Command(
            "clusters",
            "create a folder that installs trainspec without a network",
            takes_keys=True,
        ),
    },
)
