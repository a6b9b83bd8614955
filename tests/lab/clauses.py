"""The clauses of the training spec and the tests that hold them; `python -m tests.lab.clauses` writes their table anew,
and that of the kinds of files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from trainspec_cli.core.reading.files import CURRENT, UNSTATED
from trainspec_cli.run.folder.forms import FORMS, Form

CHECKOUT = Path(__file__).parents[2]
SPEC = CHECKOUT / "docs" / "spec"
DOCUMENTS = (
    SPEC / "launcher.md",
    SPEC / "scheduler.md",
    CHECKOUT / "trainspec_cli" / "wings" / "certify" / "SPEC.md",
    SPEC / "run-folder.md",
    SPEC / "recipes.md",
    SPEC / "versions.md",
    SPEC / "extensions.md",
)
TABLE, VERSIONS_PAGE = SPEC / "clauses.md", SPEC / "versions.md"
MARKER = "pytest.mark.clause"
_CLAUSE = re.compile(r"^## ([A-Z]+-\d+) (MUST NOT|MUST|SHOULD|MAY): (.+)\n\n((?:.+\n)+)", re.MULTILINE)
_FORMS = re.compile(r"(?<=<!-- forms -->\n).*?(?=<!-- end of forms -->)", re.DOTALL)


@dataclass(frozen=True)
class SpecClause:
    id: str
    level: str
    title: str
    document: Path


def read_clauses() -> list[SpecClause]:
    """Return the clauses of all documents, in their order."""
    return [
        SpecClause(id, level, title, document)
        for document in DOCUMENTS
        for id, level, title, _ in _CLAUSE.findall(document.read_text(encoding="utf-8"))
    ]


def headings() -> list[str]:
    """Return the headings of the documents that begin with the id of a clause, however they go on."""
    found = (re.findall(r"^## ([A-Z]+-\d+)", document.read_text(encoding="utf-8"), re.M) for document in DOCUMENTS)
    return [heading for headings in found for heading in headings]


@lru_cache
def held_by() -> dict[str, list[str]]:
    """Return, by the id of a clause, the tests that a marker binds to it, as pytest names them."""
    found: dict[str, list[str]] = {}
    for file in sorted((CHECKOUT / "tests").rglob("test_*.py")):
        for id, name in _markers(file):
            found.setdefault(id, []).append(f"{file.relative_to(CHECKOUT).as_posix()}::{name}")
    return found


def _markers(file: Path) -> Iterator[tuple[str, str]]:
    text = file.read_text(encoding="utf-8")
    for node in ast.parse(text).body if MARKER in text else ():
        for call in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) == MARKER:
                yield from ((ast.literal_eval(id), node.name) for id in call.args)


def render_table() -> str:
    """Return clauses.md."""
    lines = [
        f"# Clauses of the training spec {CURRENT}",
        "",
        "Every clause, with the tests that hold it; `python -m tests.lab.clauses` writes this page.",
    ]
    tests, clauses = held_by(), read_clauses()
    for document in DOCUMENTS:
        link = "../../trainspec_cli/wings/certify/SPEC.md" if document.parent != SPEC else document.name
        lines += [
            "",
            f"## [{document.name}]({link})",
            "",
            "| clause | level | what it says | held by |",
            "|---|---|---|---|",
        ]
        for clause in (one for one in clauses if one.document == document):
            held = "<br>".join(f"`{test}`" for test in tests.get(clause.id, ()))
            lines.append(f"| {clause.id} | {clause.level} | {clause.title} | {held} |")
    return "\n".join([*lines, ""])


def render_forms() -> str:
    """Return the table of kinds of files."""
    head = ["| kind | in a run folder | what it holds | current | migrated |", "|---|---|---|---|---|"]
    return "\n".join([*head, *map(_row, FORMS), ""])


def _row(form: Form) -> str:
    places = ", ".join(f"`RUN/{pattern}`" for pattern in form.patterns) or "-"
    how = "states the version" + (", in place of a `version` of its own" if form.steps else "")
    current, migrated = (f"`{form.schema}`", "never") if form.schema else (CURRENT, f"{UNSTATED}: {how}")
    return f"| {form.kind} | {places} | {form.about} | {current} | {migrated} |"


def with_forms(page: str) -> str:
    """Return versions.md with the table in it."""
    return _FORMS.sub(render_forms().replace("\\", r"\\"), page)


if __name__ == "__main__":
    TABLE.write_text(render_table(), encoding="utf-8")
    VERSIONS_PAGE.write_text(with_forms(VERSIONS_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {TABLE.relative_to(CHECKOUT)} and the table of {VERSIONS_PAGE.relative_to(CHECKOUT)}")
