"""Test an engine against the training spec."""

from trainspec_cli.core.wings import Command, Wing

WING = Wing(
    commands={
        "certify": Command(
            "clusters",
            "test this engine, on these chips, against the open training spec",
        ),
    },
)
