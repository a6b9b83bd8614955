"""The training spec: every clause has a test, and its tables say what the code and the tests say."""

from __future__ import annotations

import re

from lab import clauses

from trainspec_cli.core.reading.files import CURRENT_VERSION, VERSIONS
from trainspec_cli.recipe import user_code
from trainspec_cli.recipe.user_code import ExtensionKind
from trainspec_cli.run.folder.forms import FORMS
from trainspec_cli.wings.certify.clauses import spec_version

WRITE = "type, in the checkout: python -m tests.lab.clauses"


def test_every_clause_has_a_test_that_holds_it() -> None:
    without = [clause.id for clause in clauses.read_clauses() if clause.id not in clauses.held_by()]
    assert without == [], "mark the tests that hold them: @pytest.mark.clause(ID)"


def test_every_marker_names_a_clause() -> None:
    assert sorted(clauses.held_by().keys() - {clause.id for clause in clauses.read_clauses()}) == []


def test_every_heading_of_a_clause_is_read_and_no_id_is_given_twice() -> None:
    ids = [clause.id for clause in clauses.read_clauses()]
    assert ids == clauses.headings()
    assert len(ids) == len(set(ids)) > 50


def test_ids_are_numbered_in_their_order() -> None:
    numbers: dict[str, list[int]] = {}
    for id in (clause.id for clause in clauses.read_clauses()):
        word, _, number = id.rpartition("-")
        numbers.setdefault(word, []).append(int(number))
    assert {word: found for word, found in numbers.items() if found != [*range(1, len(found) + 1)]} == {}


def test_the_tables_are_fresh() -> None:
    assert clauses.TABLE.read_text(encoding="utf-8") == clauses.render_table(), WRITE
    page = clauses.VERSIONS_PAGE.read_text(encoding="utf-8")
    assert page == clauses.with_forms(page), WRITE
    assert all(f"\n| {form.kind} |" in page for form in FORMS)


def test_the_version_is_that_of_the_pages() -> None:
    overview = (clauses.SPEC / "overview.md").read_text(encoding="utf-8")
    assert overview.startswith(f"# The training spec {CURRENT_VERSION}\n")
    assert spec_version() == CURRENT_VERSION
    changes = re.findall(r"^## (\S+)$", (clauses.SPEC / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert changes == [*reversed(VERSIONS)]


def test_names_that_are_in_use_are_registered() -> None:
    registry = (clauses.SPEC / "extensions.md").read_text(encoding="utf-8")
    groups = [one.group for one in vars(user_code).values() if isinstance(one, ExtensionKind)]
    schemas = [form.schema for form in FORMS if form.schema]
    assert [name for name in (*groups, *schemas) if f"`{name}`" not in registry] == []
