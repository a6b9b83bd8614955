"""Install and train where no network is."""

from trainspec_cli.core.wings import Command, Wing

WING = Wing(
    commands={
        "bundle": Command(
            "clusters",
            "make a folder that installs trainspec where no network is",
            folder="trainspec_cli.wings.bundle.commands",
            takes_keys=True,
        ),
    },
)
