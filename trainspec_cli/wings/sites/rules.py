"""Rules for training at distant sites. They reject recipes that training at several sites does not support, and starts
for which something that a site needs is missing."""

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
INSTEAD = "resilience=restart"
MAKE_SECRET = "(umask 77; head -c 32 /dev/urandom > FILE)"
PACKAGES = (("resilience.mode", "sites", "cryptography", "sites"),)
"""The package that creates the servers' certificates."""


def check_sites(spec: RunSpec) -> Iterator[Problem]:
    """Check the exchange schedule, the number of sites and the addresses, and that the recipe supports sites."""
    sites = spec.resilience.sites
    if sites.interval_steps % sites.fragments:
        fitting = [number for number in range(1, sites.fragments) if sites.interval_steps % number == 0]
        message = f"`{PATH}.interval_steps` is {sites.interval_steps}, not a multiple of {sites.fragments} fragments"
        yield Problem("not_divisible", message, f"{PATH}.fragments", f"set {PATH}.fragments={fitting[-1]}")
    elif sites.delay_steps > sites.interval_steps // sites.fragments:
        between = sites.interval_steps // sites.fragments
        message = f"`{PATH}.delay_steps` is {sites.delay_steps}, but the next exchange is sent after {between} steps"
        yield Problem("out_of_range", message, f"{PATH}.delay_steps", f"set {PATH}.delay_steps={between} or less")
    else:
        # A round plans the steps between the point where its sum is applied and the point where the next round's sum is
        # applied.
        between = sites.interval_steps // sites.fragments
        delay = sites.delay_steps
        if between + delay > MAX_ITEMS:
            longest = sites.fragments * (MAX_ITEMS - delay if delay < between else MAX_ITEMS // 2)
            message = f"`{PATH}.interval_steps` gives {between:,} steps between exchanges and {delay:,} steps of delay"
            message += f", but a round can plan at most {MAX_ITEMS:,} steps"
            hint = f"set {PATH}.interval_steps={longest} or less, or more {PATH}.fragments"
            yield Problem("out_of_range", message, f"{PATH}.interval_steps", hint)
    if sites.count == 1:
        message = f"`{PATH}.count` is 1, but an exchange needs at least two sites"
        yield Problem("out_of_range", message, f"{PATH}.count", f"set {PATH}.count=2 or more, or {INSTEAD}")
    for key, number, most in (("quorum", sites.quorum, sites.count), ("site", sites.site or 0, sites.count - 1)):
        if number > most:
            message = f"`{PATH}.{key}` is {number}, but with {sites.count} sites it can be at most {most}"
            yield Problem("out_of_range", message, f"{PATH}.{key}", f"set {PATH}.{key}={most} or less")

    # Check the addresses of the meeting point and of this site.
    meanings = {
        "endpoint": (sites.endpoint, "the address of site 0"),
        "listen": (sites.listen, "the address of this site for the other sites"),
    }
    for key, (wanted, example) in meanings.items():
        if wanted is None:
            continue
        host, _, port = wanted.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            message = f"`{PATH}.{key}` is `{wanted}`; HOST:PORT is required"
            yield Problem("usage", message, f"{PATH}.{key}", f"set {PATH}.{key}=HOST:PORT, {example}")
    if sites.listen is not None and sites.site == FIRST_SITE:
        message = f"`{PATH}.listen` is `{sites.listen}`, but site {FIRST_SITE} already listens at `{PATH}.endpoint`"
        yield Problem("usage", message, f"{PATH}.listen", "remove it here; only the other sites need it")

    # Find settings that sites do not support.
    has_experts = any("experts" in layer.mixers for layer in getattr(spec.model, "layer_list", ()))
    unlike = {
        "model": (spec.model.unit != "tokens", "only supports language models", "choose another model"),
        "model.experts": (has_experts, "does not merge the expert-balancing state", "choose a dense model"),
        "train": (spec.ends_by_samples, "needs the same number of steps at all sites", "set train.max_steps only"),
        "checkpoint.keep_best": (spec.checkpoint.keep_best, "only evaluates the merged model", "leave it out"),
        "train.early_stop_evals": (spec.train.early_stop_evals is not None, "ends at its last step", "leave it out"),
        "scheduler.changes": (bool(spec.scheduler.changes), "does not change its layout", "leave it out"),
    }
    for path, (is_wanted, why, hint) in unlike.items():
        if is_wanted:
            yield Problem("unsupported", f"resilience=sites {why}", path, f"{hint}, or set {INSTEAD}")


SITES_RULES = (check_sites,)


def check_start(spec: RunSpec) -> None:
    """Raise RecipeError if a site's run has no site number or no meeting point, and MachineError if its secret cannot
    be used."""
    sites = spec.resilience.sites
    given = {"site": sites.site, "endpoint": sites.endpoint, "secret": sites.secret}
    for key, value in given.items():
        if value is None:
            path = f"{PATH}.{key}"
            message = (
                f"`{path}` is missing: `resilience.mode` is sites, and this command starts one of {sites.count} sites"
            )
            hint = (
                f"at each site, set {EXAMPLE}; HOST:PORT is the address of site 0, and FILE is the same at all "
                f"sites: {MAKE_SECRET}"
            )
            raise RecipeError(Problem("missing_value", message, path, hint))
    try:
        read_secret(Path(str(sites.secret)))
    except MachineError as error:
        message = error.problems[0].message.replace("the job's secret", "the sites' secret")
        hint = f"create the secret once, and copy it to every site: {MAKE_SECRET}"
        raise MachineError(Problem("secret", message, f"{PATH}.secret", hint, environment=True)) from error
