"""The process that rehearses a rank: `python -m trainspec_cli.wings.emulated.engine rehearse FOLDER`."""

from __future__ import annotations

from trainspec_cli.engine.tools.__main__ import main

if __name__ == "__main__":
    main(__package__)
