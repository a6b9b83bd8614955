"""Install and train where no network is."""

from trainspec_cli.core.wings import Command, Wing

WING = Wing(
    commands={
        "bundle": Command(
            "clusters",
            "make a folder that installs trainspec where no network is",
            takes_keys=True,
        ),
    },
)
