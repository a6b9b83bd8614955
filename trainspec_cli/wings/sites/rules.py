"""What training at far-apart sites refuses: recipes that do not fit, and a start that lacks what its site needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.recipe.keys.resilience import FIRST_SITE
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import MAX_ITEMS
from trainspec_cli.run.folder.generations import read_secret

PATH = "resilience.sites"
EXAMPLE = f"{PATH}.site=I {PATH}.endpoint=HOST:PORT {PATH}.secret=FILE"
OTHERWISE = "resilience=restart"
MAKE_SECRET = "(umask 77; head -c 32 /dev/urandom > FILE)"
PACKAGES = (("resilience.mode", "sites", "cryptography", "sites"),)
"""It makes the certificates of the servers."""


def numbers(spec: RunSpec) -> Iterator[Problem]:
    """The schedule of exchanges, and who takes part."""
    sites = spec.resilience.sites
    if sites.interval_steps % sites.fragments:
        fitting = [number for number in range(1, sites.fragments) if sites.interval_steps % number == 0]
        message = f"`{PATH}.interval_steps` is {sites.interval_steps}, no multiple of {sites.fragments} fragments"
        yield Problem("not_divisible", message, f"{PATH}.fragments", f"type {PATH}.fragments={fitting[-1]}")
    elif sites.delay_steps > sites.interval_steps // sites.fragments:
        between = sites.interval_steps // sites.fragments
        message = f"`{PATH}.delay_steps` is {sites.delay_steps}, and the next exchange is sent after {between} steps"
        yield Problem("out_of_range", message, f"{PATH}.delay_steps", f"type {PATH}.delay_steps={between} or less")
    else:
        # A round plans the steps from when its sum is applied until the next one is.
        between = sites.interval_steps // sites.fragments
        delay = sites.delay_steps
        if between + delay > MAX_ITEMS:
            longest = sites.fragments * (MAX_ITEMS - delay if delay < between else MAX_ITEMS // 2)
            message = f"`{PATH}.interval_steps` has {between:,} steps between exchanges, and sums {delay:,} steps late"
            message += f": a round plans {MAX_ITEMS:,} steps at most"
            hint = f"type {PATH}.interval_steps={longest} or less, or more {PATH}.fragments"
            yield Problem("out_of_range", message, f"{PATH}.interval_steps", hint)
    if sites.count == 1:
        message = f"`{PATH}.count` is 1; one site has no other to exchange with"
        yield Problem("out_of_range", message, f"{PATH}.count", f"type {PATH}.count=2 or more, or {OTHERWISE}")
    for key, number, most in (("quorum", sites.quorum, sites.count), ("site", sites.site or 0, sites.count - 1)):
        if number > most:
            message = f"`{PATH}.{key}` is {number}, and of {sites.count} sites it is {most} at most"
            yield Problem("out_of_range", message, f"{PATH}.{key}", f"type {PATH}.{key}={most} or less")


def addresses(spec: RunSpec) -> Iterator[Problem]:
    """Where the sites meet, and where this one is reached."""
    sites = spec.resilience.sites
    meanings = {
        "endpoint": (sites.endpoint, "as all sites reach site 0"),
        "listen": (sites.listen, "as the other sites reach this one"),
    }
    for key, (wanted, example) in meanings.items():
        if wanted is not None and not _is_address(wanted):
            message = f"`{PATH}.{key}` is `{wanted}`; HOST:PORT is needed"
            yield Problem("usage", message, f"{PATH}.{key}", f"type {PATH}.{key}=HOST:PORT, {example}")
    if sites.listen is not None and sites.site == FIRST_SITE:
        message = f"`{PATH}.listen` is `{sites.listen}`, and site {FIRST_SITE} is reached at `{PATH}.endpoint`"
        yield Problem("usage", message, f"{PATH}.listen", "leave it out there; the other sites need it")


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdigit() and 0 < int(port) < 2**16


def other_parts(spec: RunSpec) -> Iterator[Problem]:
    """What sites cannot do together."""
    has_experts = any("experts" in layer.mixers for layer in getattr(spec.model, "layer_list", ()))
    unlike = {
        "model": (spec.model.unit != "tokens", "exchanges the layers of language models", "choose another model"),
        "model.experts": (has_experts, "does not merge the balance of experts", "choose a dense model"),
        "train": (spec.ends_by_samples, "counts steps, which are the same at all sites", "type train.max_steps alone"),
        "checkpoint.keep_best": (spec.checkpoint.keep_best, "judges the merged model", "leave it out"),
        "train.early_stop_evals": (spec.train.early_stop_evals is not None, "ends at its last step", "leave it out"),
        "scheduler.changes": (bool(spec.scheduler.changes), "keeps the layout it begins with", "leave it out"),
    }
    for path, (is_wanted, why, hint) in unlike.items():
        if is_wanted:
            yield Problem("unsupported", f"resilience=sites {why}", path, f"{hint}, or type {OTHERWISE}")


SITES_RULES = (numbers, addresses, other_parts)


def check_start(spec: RunSpec) -> None:
    """Raise RecipeError where the run of one site lacks its number, or where they meet; MachineError where its secret
    cannot be used."""
    sites = spec.resilience.sites
    given = {"site": sites.site, "endpoint": sites.endpoint, "secret": sites.secret}
    for key, value in given.items():
        if value is None:
            path = f"{PATH}.{key}"
            message = f"`{path}` is null, and `resilience.mode` is sites: this command starts one of {sites.count}"
            hint = f"at each site: {EXAMPLE}; site 0 listens at HOST:PORT, and all have the same FILE: {MAKE_SECRET}"
            raise RecipeError(Problem("missing_value", message, path, hint))
    try:
        read_secret(Path(str(sites.secret)))
    except MachineError as error:
        message = error.problems[0].message.replace("the job's secret", "the sites' secret")
        hint = f"make it once, and copy it to every site: {MAKE_SECRET}"
        raise MachineError(Problem("secret", message, f"{PATH}.secret", hint, environment=True)) from error
