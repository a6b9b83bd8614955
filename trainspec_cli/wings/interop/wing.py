"""Write recipes as configurations for other engines, and read other engines' configurations as recipes."""

from trainspec_cli.core.wings import Command, Wing

WING = Wing(
    commands={
        "emit": Command(
            "other engines",
            "write a recipe's plan as another engine's configuration",
            takes_keys=True,
        ),
        "import": Command(
            "other engines",
            "read another engine's configuration as a recipe for planning",
            function="import_recipe",
        ),
    },
)
