"""Write recipes as configurations of other engines, and read such configurations as recipes."""

from trainspec_cli.core.wings import Command, Wing

WING = Wing(
    commands={
        "emit": Command(
            "other engines",
            "write a recipe's plan as the configuration of another engine",
            takes_keys=True,
        ),
        "import": Command(
            "other engines",
            "read another engine's configuration as a recipe to plan with",
            function="import_recipe",
        ),
    },
)
