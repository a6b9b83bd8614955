"""The page that a bundle holds for whoever unpacks it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from trainspec_cli.bundle.installer import INSTALLER, RECORD, WHEELS
from trainspec_cli.bundle.sbom import SBOM

README = "README.md"
_PAGE = """\
# trainspec {version}, without a network

This folder installs trainspec and trains where there is no way out. It needs Python {python}.

```sh
python{python} {installer} ~/trainspec
{launches}
```

`{installer}` compares every file with `{record}` first, and says what is missing or altered; `--check` does that alone.
pip reads no settings and no index.

| what | is |
|---|---|
| `{record}` | what the bundle is for, and the sha256 of every file |
| `{wheels}/` | trainspec, all that it depends on, and pip |
| `conf/`, `recipes/` | recipes and their groups, to be changed; found by every command that is typed in this folder |
| `data/`, `tokenizers/`, `weights/` | what the recipes named above read |
| `{sbom}` | every wheel with version, licence and digest (CycloneDX) |
"""


def readme(version: str, python: str, launches: Mapping[str, Sequence[str]]) -> str:
    lines = [shlex.join(words) for words in launches.values()] or ["recipe=quickstart"]
    return _PAGE.format(
        version=version,
        python=python,
        installer=INSTALLER,
        record=RECORD,
        wheels=WHEELS,
        sbom=SBOM,
        launches="\n".join(f"~/trainspec/bin/trainspec launch {line}" for line in lines),
    )
