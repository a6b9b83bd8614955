"""Recipes as other engines' configurations, and back."""

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
            "read another engine's configuration into a recipe, which plan answers for",
            function="import_recipe",
        ),
    },
)
