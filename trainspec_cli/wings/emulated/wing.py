"""A software accelerator."""

from trainspec_cli.core.wings import Wing

WING = Wing(parts={"devices": "trainspec_cli.wings.emulated.engine.device:PLUGIN"})
