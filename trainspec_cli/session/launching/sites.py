"""One of several far-apart sites: what its command line says, and the server that it runs beside its run, the meeting
point at site 0 and an inbox elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.recipe.keys.resilience import FIRST_SITE
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.generations import read_secret
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.place import listen, listening_address
from trainspec_cli.session.recipe.load import Loaded, load

if TYPE_CHECKING:
    from trainspec_cli.wings.sites.inbox import SiteInbox
    from trainspec_cli.wings.sites.meeting_point import MeetingPoint

PATH = "resilience.sites"
EXAMPLE = "--site I --sites-endpoint HOST:PORT --sites-secret FILE"
MAKE_SECRET = "(umask 77; head -c 32 /dev/urandom > FILE)"


@dataclass(frozen=True)
class SiteOptions:
    """The command line's options about sites."""

    site: int | None = None
    endpoint: str | None = None
    secret: str | None = None
    listen: str | None = None

    @property
    def as_arguments(self) -> list[str]:
        secret = self.secret and str(Path(self.secret).expanduser().absolute())
        given = {"site": self.site, "endpoint": self.endpoint, "secret": secret, "listen": self.listen}
        return [f"{PATH}.{key}={value}" for key, value in given.items() if value is not None]

    @property
    def given(self) -> list[str]:
        """Return the options that were given."""
        options = {"--site": self.site, "--sites-endpoint": self.endpoint, "--sites-secret": self.secret}
        options["--site-listen"] = self.listen
        return [option for option, value in options.items() if value is not None]

    def check(self, spec: RunSpec) -> None:
        """Raise RecipeError where options of sites are given to another run."""
        if self.given and spec.resilience.mode != "sites":
            message = f"{self.given[0]} is of far-apart sites, and `resilience.mode` is {spec.resilience.mode}"
            raise RecipeError(Problem("usage", message, self.given[0], "type resilience=sites, or leave it out"))


def check_site(spec: RunSpec) -> None:
    """Raise RecipeError where a run of one site does not say which, and where they meet; MachineError where its secret
    cannot be used."""
    sites = spec.resilience.sites
    if spec.resilience.mode != "sites":
        return
    given = {"--site": sites.site, "--sites-endpoint": sites.endpoint, "--sites-secret": sites.secret}
    for option, value in given.items():
        if value is None:
            message = f"{option} is not given, and `resilience.mode` is sites: this command starts one of {sites.count}"
            hint = f"at each site: {EXAMPLE}; site 0 listens at HOST:PORT, and all have the same FILE: {MAKE_SECRET}"
            raise RecipeError(Problem("missing_value", message, option, hint))
    try:
        read_secret(Path(str(sites.secret)))
    except MachineError as error:
        message = error.problems[0].message.replace("the job's secret", "the sites' secret")
        hint = f"make it once, and copy it to every site: {MAKE_SECRET}"
        raise MachineError(Problem("secret", message, f"{PATH}.secret", hint, environment=True)) from error


def load_site(arguments: Sequence[str], options: SiteOptions) -> Loaded:
    """Load a recipe with the options of its site. Raises RecipeError."""
    if options.given:
        options.check(load(arguments).spec)
    return load([*arguments, *options.as_arguments])


@contextmanager
def site_server(run: RunDir, plan: Plan) -> Iterator[None]:
    """Have the server of a site inside: the meeting point at site 0, elsewhere an inbox, where it is to have one."""
    sites = plan.spec.resilience.sites
    address = sites.endpoint if sites.site == FIRST_SITE else sites.listen
    if plan.spec.resilience.mode != "sites" or address is None:
        yield
        return
    host, _, port = address.rpartition(":")
    listener = listen(listening_address(host), int(port))
    run.sites.mkdir(exist_ok=True)
    secret = read_secret(Path(str(sites.secret)))
    with (run.sites / "sites.log").open("a", encoding="utf-8") as log:
        server = _make_server(run, plan, secret, log)
        server.start(listener)
        try:
            yield
        finally:
            server.close()


def _make_server(run: RunDir, plan: Plan, secret: bytes, log: TextIO) -> MeetingPoint | SiteInbox:
    """Import asyncio, which other runs do without."""
    if plan.spec.resilience.sites.site == FIRST_SITE:
        from trainspec_cli.wings.sites.meeting_point import make_meeting_point

        return make_meeting_point(plan, run.sites, secret, log)
    from trainspec_cli.wings.sites.inbox import make_inbox

    return make_inbox(plan, secret, log)
