"""A site's command line: what is missing is refused with what to type."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.run.folder.generations import create_secret
from trainspec_cli.session.launching.sites import SiteOptions, check_site, load_site

RECIPE = ("recipe=tiny", "resilience=sites")


def test_options_are_values_of_the_recipe(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    create_secret(secret)
    spec = load_site(RECIPE, SiteOptions(1, "host.example:29500", str(secret))).spec
    check_site(spec)
    sites = spec.resilience.sites
    assert (sites.site, sites.endpoint, sites.secret) == (1, "host.example:29500", str(secret))


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        (SiteOptions(), "--site is not given"),
        (SiteOptions(0), "--sites-endpoint is not given"),
        (SiteOptions(0, "host:1"), "--sites-secret is not given"),
    ],
)
def test_what_a_site_lacks_is_said(options: SiteOptions, missing: str) -> None:
    with pytest.raises(RecipeError, match=missing) as refused:
        check_site(load_site(RECIPE, options).spec)
    assert "--site I --sites-endpoint HOST:PORT --sites-secret FILE" in str(refused.value.problems[0].hint)


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    create_secret(secret)
    secret.chmod(0o644)
    with pytest.raises(MachineError, match="others may read it") as refused:
        check_site(load_site(RECIPE, SiteOptions(0, "host:1", str(secret))).spec)
    assert "umask 77" in str(refused.value.problems[0].hint)


def test_options_of_sites_belong_to_sites() -> None:
    with pytest.raises(RecipeError, match=r"--site is of far-apart sites, and `resilience\.mode` is restart"):
        load_site(("recipe=tiny",), SiteOptions(0))
