"""Training commands of the user's own, started and supervised as they are."""

from trainspec_cli.core.wings import Command, Wing

WING = Wing(
    commands={
        "run": Command(
            "train",
            "run a training command of your own, as it is, with all that a recipe gets",
            folder="trainspec_cli.wings.own_script.commands",
            takes_command=True,
        ),
    },
)
