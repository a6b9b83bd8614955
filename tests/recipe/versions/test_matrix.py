"""Files of each earlier version, as the trainspec of that time wrote them: they are read, migrated, and read again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from jsonschema import Draft7Validator

from trainspec_cli.core.reading.files import CURRENT, VERSION_KEY, VERSIONS
from trainspec_cli.recipe.compose.compose import compose
from trainspec_cli.reporter.collect import collect
from trainspec_cli.run.folder.events import read_log
from trainspec_cli.run.folder.file_schemas import FILE_SCHEMAS
from trainspec_cli.run.folder.forms import FORMS
from trainspec_cli.run.folder.own_code import read_code
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import (
    NodeErrorRecord,
    WorkerErrorRecord,
    read_composed,
    read_error,
    read_plan,
    read_result,
    read_run_record,
)
from trainspec_cli.session.planning.profile import read_profile
from trainspec_cli.session.recipe.migrate import apply, find_migrations
from trainspec_cli.wings.certify.certificate import verify

HERE = Path(__file__).parent
EARLIER = sorted(folder.name for folder in HERE.iterdir() if folder.is_dir() and folder.name[0].isdigit())
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "run": ("run", lambda path: read_run_record(RunDir(path))),
    "a command of one's own": ("own", lambda path: read_run_record(RunDir(path))),
    "plan": ("run", lambda path: read_plan(RunDir(path))),
    "result": ("run", lambda path: read_result(RunDir(path))),
    "events": ("run", lambda path: [list(read_log(one)) for one in sorted((path / "events").glob("*.jsonl"))]),
    "directives": ("run", lambda path: list(read_log(RunDir(path).directives))),
    "report": ("run", lambda path: collect(path)),
    "composed": ("run", lambda path: read_composed(RunDir(path)).removeprefix(f'{VERSION_KEY}: "{CURRENT}"\n')),
    "code": ("others", lambda path: read_code(RunDir(path))),
    "error": ("others", lambda path: read_error(RunDir(path).error(1), WorkerErrorRecord)),
    "node": ("others", lambda path: read_error(RunDir(path).node_error(1), NodeErrorRecord)),
    "recipe": ("recipe.yaml", lambda path: compose(str(path)).data),
    "profile": ("profile.yaml", read_profile),
    "certificate": ("certificate.json", verify),
}
"""What is read -> the path of its file or run folder, and its reader."""


@pytest.fixture
def files(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of the files of a version, which may be written to."""
    return shutil.copytree(HERE / request.param, tmp_path / "files")


def content(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if ".bak" not in path.name}


def test_every_earlier_version_has_its_files() -> None:
    assert [*VERSIONS[:-1]] == EARLIER


@pytest.mark.clause("VER-2", "VER-3", "VER-6")
@pytest.mark.parametrize("files", EARLIER, indirect=True)
@pytest.mark.parametrize("what", READERS)
def test_what_is_read_before_and_after_is_the_same(files: Path, what: str) -> None:
    name, read = READERS[what]
    before = read(files / name)
    apply(find_migrations([str(files / name)]))
    assert read(files / name) == before


@pytest.mark.clause("VER-1", "VER-6")
@pytest.mark.parametrize("files", EARLIER, indirect=True)
def test_migrated_files_state_the_version_and_are_not_migrated_again(files: Path) -> None:
    names = [str(files / name) for name in ("run", "own", "others", "recipe.yaml", "profile.yaml", "certificate.json")]
    before = content(files)
    migrated = apply(find_migrations(names))
    kinds = {migration.form.kind for migration in find_migrations(names)}
    assert kinds >= {"recipe", "profile", "run", "plan", "result", "events", "directives", "speeds", "looks", "error"}
    assert {backup.read_bytes() for backup in migrated.values()} == {
        before[str(path.relative_to(files))] for path in migrated
    }
    for path in migrated:
        assert VERSION_KEY in path.read_text().split("\n{", 1)[0], path
    after = content(files)
    assert apply(find_migrations(names)) == {}
    assert content(files) == after


@pytest.mark.clause("VER-8")
@pytest.mark.parametrize("files", EARLIER, indirect=True)
def test_what_is_under_a_digest_keeps_every_byte(files: Path) -> None:
    before = content(files)
    migrated = apply(find_migrations([str(files / "run"), str(files / "certificate.json")]))
    sealed = [name for name in before if "checkpoints/" in name or name == "certificate.json"]
    assert len(sealed) == 4 and all(content(files)[name] == before[name] for name in sealed)
    assert {str(path.relative_to(files)) for path in migrated}.isdisjoint(sealed)


@pytest.mark.clause("RUN-11")
@pytest.mark.parametrize("files", EARLIER, indirect=True)
def test_migrated_files_keep_to_the_schemas(files: Path) -> None:
    apply(find_migrations([str(files / "run"), str(files / "own")]))
    checkers = {kind: Draft7Validator(json.loads(json.dumps(schema()))) for kind, schema in FILE_SCHEMAS.items()}
    for root in (files / "run", files / "own"):
        for kind in ("run", "plan", "result"):
            if (root / f"{kind}.json").exists():
                assert list(checkers[kind].iter_errors(json.loads((root / f"{kind}.json").read_text()))) == []
        for events in (root / "events").glob("*.jsonl"):
            for line in events.read_text().splitlines():
                assert list(checkers["event"].iter_errors(json.loads(line))) == [], line
    for line in RunDir(files / "run").directives.read_text().splitlines():
        assert list(checkers["directive"].iter_errors(json.loads(line))) == []
    assert list(checkers["certificate"].iter_errors(json.loads((files / "certificate.json").read_text()))) == []


def test_every_kind_that_is_migrated_is_known_by_one_pattern() -> None:
    patterns = [pattern for form in FORMS for pattern in form.patterns]
    assert len(patterns) == len(set(patterns)) and len({form.kind for form in FORMS}) == len(FORMS)
