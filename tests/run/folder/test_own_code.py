"""The user-defined code of a run, kept with it and compared: also what the named file imports from its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainspec_cli.core.errors import MachineError
from trainspec_cli.data.corpus.user_code import tokenizer_sha256
from trainspec_cli.run.folder.own_code import check_code, describe_changed_code, keep_code, read_code
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.wings.certify.cases import Case, build_plan


def test_a_changed_neighbour_is_a_change_of_the_code(tmp_path: Path) -> None:
    named = tmp_path / "tokens.py"
    neighbour = tmp_path / "pieces.py"
    named.write_text("import pieces\nclass Tokens: ...\n")
    neighbour.write_text("size = 1\n")
    plain = build_plan(Case("dense"), "cpu").spec
    tokenizer = replace(plain.data.tokenizer, code=f"{named}:Tokens")
    spec = replace(plain, data=replace(plain.data, tokenizer=tokenizer))
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    keep_code(spec, run)
    kept = read_code(run).files
    assert {path: file.keys for path, file in kept.items()} == {
        str(named): {"data.tokenizer.code": "Tokens"},
        str(neighbour): {"data.tokenizer.code": ""},
    }
    assert (run.code / kept[str(neighbour)].copy).read_text() == "size = 1\n"
    check_code(spec, run)
    digest = tokenizer_sha256(spec.data)

    neighbour.write_text("size = 2\n")
    assert tokenizer_sha256(spec.data) != digest, "data that was prepared with the other is not taken"
    assert [line.split()[0] for line in describe_changed_code(run)] == [str(neighbour)]
    with pytest.raises(MachineError) as refused:
        check_code(spec, run)
    assert refused.value.problems[0].code == "changed_code"
    assert str(neighbour) in refused.value.problems[0].message
    check_code(plain, run)
