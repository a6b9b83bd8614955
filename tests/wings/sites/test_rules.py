"""What far-apart sites refuse: recipes that do not fit, named with the key and what to type, and incomplete starts."""

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
    ("changes", "path", "says"),
    [
        ({f"{OF}.interval_steps": 10}, f"{OF}.fragments", "no multiple of 4 fragments"),
        ({f"{OF}.delay_steps": 26}, f"{OF}.delay_steps", "sent after 25 steps"),
        ({f"{OF}.interval_steps": 4000}, f"{OF}.interval_steps", "a round plans 1,000 steps at most"),
        ({f"{OF}.count": 1}, f"{OF}.count", "no other to exchange with"),
        ({f"{OF}.quorum": 3}, f"{OF}.quorum", "of 2 sites it is 2 at most"),
        ({f"{OF}.site": 2}, f"{OF}.site", "of 2 sites it is 1 at most"),
        ({f"{OF}.endpoint": "host"}, f"{OF}.endpoint", "HOST:PORT is needed"),
        ({f"{OF}.listen": "host:0"}, f"{OF}.listen", "HOST:PORT is needed"),
        ({f"{OF}.site": 0, f"{OF}.listen": "host:1"}, f"{OF}.listen", "site 0 is reached at"),
        ({"train.tokens": 1000}, "train", "counts steps"),
        ({"train.early_stop_evals": 2, "train.eval_interval_steps": 5}, "train.early_stop_evals", "its last step"),
        ({"checkpoint.keep_best": True, "train.eval_interval_steps": 5}, "checkpoint.keep_best", "merged model"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], path: str, says: str) -> None:
    found = {problem.path: problem for problem in check(spec_of(SITES | changes))}
    assert says in found[path].message
    assert found[path].hint


def test_what_fits_is_not() -> None:
    assert (
        check(spec_of(SITES | {f"{OF}.site": 1, f"{OF}.endpoint": "a.example:29500", f"{OF}.listen": "b.example:1"}))
        == []
    )


def test_fragments_that_divide_the_interval_are_proposed() -> None:
    (problem,) = check(spec_of(SITES | {f"{OF}.interval_steps": 9}))
    assert problem.hint == f"type {OF}.fragments=3"


@pytest.mark.parametrize("key", ["site", "endpoint", "listen", "secret"])
def test_what_options_of_one_start_set_is_refused_in_another_run(key: str) -> None:
    (problem,) = check(spec_of({f"{OF}.{key}": 0 if key == "site" else "host:1"}))
    assert (problem.code, problem.path) == ("usage", f"{OF}.{key}")
    assert "resilience=sites" in problem.hint


def test_a_start_gives_site_endpoint_and_a_secret_which_is_found_from_any_folder(tmp_path: Path) -> None:
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
def test_what_a_start_lacks_is_named(given: tuple[str, ...], missing: str) -> None:
    spec = load([*RECIPE, *given]).spec
    with pytest.raises(RecipeError) as refused:
        check_start(spec)
    (problem,) = refused.value.problems
    assert (problem.code, problem.path) == ("missing_value", missing)
    assert f"{OF}.endpoint=HOST:PORT" in problem.hint


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    create_secret(secret)
    secret.chmod(0o644)
    spec = load([*RECIPE, f"{OF}.site=0", f"{OF}.endpoint=host:1", f"{OF}.secret={secret}"]).spec
    with pytest.raises(MachineError, match="others may read it") as refused:
        check_start(spec)
    assert "umask 77" in refused.value.problems[0].hint
