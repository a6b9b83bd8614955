"""The process of a rehearsal: `python -m trainspec_cli.wings.emulated.engine rehearse FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from trainspec_cli.recipe.records import from_plain, to_plain
from trainspec_cli.recipe.results.tools import REQUEST, RESULT
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.wings.emulated.engine.rehearse import run
from trainspec_cli.wings.emulated.rehearsal import RehearsalRequest

if __name__ == "__main__":
    folder = Path(sys.argv[2])
    write_json(folder / RESULT, to_plain(run(from_plain(RehearsalRequest, read_json(folder / REQUEST)))))
