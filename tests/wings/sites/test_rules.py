"""Rules for distant sites: recipes that do not fit are refused by key with what to type, and so are incomplete
starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import build
from trainspec_cli.recipe.rules.check import check
from trainspec_cli.run.folder.generations import create_secret
from trainspec_cli.session.recipe.load import check_start, load

SITES = {"resilience.mode": "sites"}
OF = "resilience.sites"
RECIPE = ("recipe=tiny", "resilience=sites")


def spec_of(changes: dict[str, object]) -> RunSpec:
    model = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_size": 160}
    data: dict[str, dict[str, object]] = {
        "model": {**model, "vocab_size": 512},
        "data": {"seq_len": 64, "source": "python_stdlib", "tokenizer": {"vocab_size": 512}},
        "optim": {"lr": 0.1},
        "batching": {"global_batch_size": 8},
        "train": {"max_steps": 20},
        "cluster": {"devices_per_node": 2},
    }
    for path, value in changes.items():
        *sections, name = path.split(".")
        node = data
        for section in sections:
            node = node.setdefault(section, {})  # type: ignore[assignment]
        node[name] = value  # type: ignore[assignment]
    spec, problems = build(RunSpec, data)
    assert spec is not None, problems
    return spec


@pytest.mark.parametrize(
    ("changes", "path", "code"),
    [
        ({f"{OF}.interval_steps": 10}, f"{OF}.fragments", "not_divisible"),
        ({f"{OF}.delay_steps": 26}, f"{OF}.delay_steps", "out_of_range"),
        ({f"{OF}.interval_steps": 4000}, f"{OF}.interval_steps", "out_of_range"),
        ({f"{OF}.count": 1}, f"{OF}.count", "out_of_range"),
        ({f"{OF}.quorum": 3}, f"{OF}.quorum", "out_of_range"),
        ({f"{OF}.site": 2}, f"{OF}.site", "out_of_range"),
        ({f"{OF}.endpoint": "host"}, f"{OF}.endpoint", "usage"),
        ({f"{OF}.listen": "host:0"}, f"{OF}.listen", "usage"),
        ({f"{OF}.site": 0, f"{OF}.listen": "host:1"}, f"{OF}.listen", "usage"),
        ({"train.tokens": 1000}, "train", "unsupported"),
        ({"train.early_stop_evals": 2, "train.eval_interval_steps": 5}, "train.early_stop_evals", "unsupported"),
        ({"checkpoint.keep_best": True, "train.eval_interval_steps": 5}, "checkpoint.keep_best", "unsupported"),
    ],
)
def test_an_unsupported_recipe_is_refused(changes: dict[str, object], path: str, code: str) -> None:
    found = {problem.path: problem for problem in check(spec_of(SITES | changes))}
    assert found[path].code == code
    assert found[path].hint


def test_a_valid_recipe_is_accepted() -> None:
    assert (
        check(spec_of(SITES | {f"{OF}.site": 1, f"{OF}.endpoint": "a.example:29500", f"{OF}.listen": "b.example:1"}))
        == []
    )


def test_fragments_that_divide_the_interval_are_proposed() -> None:
    (problem,) = check(spec_of(SITES | {f"{OF}.interval_steps": 9}))
    assert problem.hint == f"set {OF}.fragments=3"


@pytest.mark.parametrize("key", ["site", "endpoint", "listen", "secret"])
def test_keys_of_a_sites_start_are_refused_in_other_runs(key: str) -> None:
    (problem,) = check(spec_of({f"{OF}.{key}": 0 if key == "site" else "host:1"}))
    assert (problem.code, problem.path) == ("usage", f"{OF}.{key}")
    assert "resilience=sites" in problem.hint


def test_a_start_gives_site_endpoint_and_a_secret_with_an_absolute_path(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    create_secret(secret)
    given = (f"{OF}.site=1", f"{OF}.endpoint=host.example:29500", f"{OF}.secret=secret")
    spec = load([*RECIPE, *given], tmp_path).spec
    check_start(spec)
    sites = spec.resilience.sites
    assert (sites.site, sites.endpoint, sites.secret) == (1, "host.example:29500", str(secret))


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ((), f"{OF}.site"),
        ((f"{OF}.site=0",), f"{OF}.endpoint"),
        ((f"{OF}.site=0", f"{OF}.endpoint=host:1"), f"{OF}.secret"),
    ],
)
def test_an_incomplete_start_names_the_missing_key(given: tuple[str, ...], missing: str) -> None:
    spec = load([*RECIPE, *given]).spec
    with pytest.raises(RecipeError) as refused:
        check_start(spec)
    (problem,) = refused.value.problems
    assert (problem.code, problem.path) == ("missing_value", missing)
    assert f"{OF}.endpoint=HOST:PORT" in problem.hint


def test_a_secret_that_other_users_may_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    create_secret(secret)
    secret.chmod(0o644)
    spec = load([*RECIPE, f"{OF}.site=0", f"{OF}.endpoint=host:1", f"{OF}.secret={secret}"]).spec
    with pytest.raises(MachineError) as refused:
        check_start(spec)
    (problem,) = refused.value.problems
    assert problem.code == "secret" and "umask 77" in problem.hint
