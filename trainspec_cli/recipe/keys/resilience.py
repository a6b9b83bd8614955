"""The response to failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from trainspec_cli.recipe.field_types import (
    AUTO,
    AutoInt,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
)

RecoveryMode = Literal["restart", "elastic", "sites", "none"]
SiteFormat = Literal["int4", "int8", "bf16"]
FIRST_SITE = 0
"""The site of the meeting point."""


@dataclass(frozen=True)
class SitesSpec:
    """Training at far-apart sites (`mode` sites). Each site is a run of its own, of the same recipe but for `site`,
    `batching` and `cluster`; the sites exchange what they have learned, a fragment of the model at a time, by outer
    gradients (Streaming DiLoCo, arXiv:2501.18512)."""

    count: PositiveInt = 2
    """Sites that the run begins with; all of them are waited for at the start."""
    site: NonNegativeInt | None = None
    """The number of this site, from 0, which each site's command gives. Site 0 runs the meeting point: while it is away
    the others train to their next exchange and wait for it there."""
    endpoint: str | None = None
    """HOST:PORT of the meeting point, as all sites reach it."""
    listen: str | None = None
    """HOST:PORT at which this site, other than site 0, listens for outer gradients of the others, as they and its own
    ranks reach it. Without it they come through the meeting point."""
    secret: str | None = None
    """The file of 32 random bytes that all sites share, which nobody else may read. Nodes of a site read it under
    the same path."""
    interval_steps: PositiveInt = 100
    """Each fragment is exchanged every so many steps (H)."""
    fragments: PositiveInt = 4
    """Parts of the model that are exchanged in turns: of 4, each has every fourth layer. `interval_steps` is a
    multiple."""
    delay_steps: NonNegativeInt = 5
    """A sum is applied so many steps after it was sent (tau), while training goes on; at most `interval_steps` /
    `fragments`."""
    format: SiteFormat = "int4"
    """The format of outer gradients on the wire; sums are made in fp32, and what is lost comes with the next one."""
    keep: Fraction | None = None
    """Mixes a site's weights with the shared ones in each exchange, of its own so great a part (Streaming DiLoCo: 0.5).
    null: they move as the shared ones do, so that a site keeps all that it has not sent."""
    outer_lr: PositiveFloat = 1.0
    """The rate of the outer optimizer (SGD with Nesterov momentum)."""
    outer_momentum: Annotated[float, Range(0, 1, includes_high=False)] = 0.5
    """Its momentum."""
    quorum: PositiveInt = 1
    """The least number of sites whose work makes an exchange; with fewer the sites wait."""
    grace_s: NonNegativeFloat = 30.0
    """An exchange that has its quorum waits so long for sites that are connected and late; one that is late twice in a
    row is left out until it has caught up."""
    link_gbit_s: PositiveFloat | None = None
    """Gbit/s of each site's link, each way, for `trainspec plan`; null: the exchange is not planned."""
    link_delay_s: NonNegativeFloat = 0.05
    """The delay from one site to another, one way, for `trainspec plan`."""


@dataclass(frozen=True)
class ResilienceSpec:
    mode: RecoveryMode = "restart"
    """restart: a failure ends all processes, and the run restarts from its last checkpoint.

    elastic: the surviving replica groups continue, and the failed one restarts and heals from them.

    sites: this run is one of several far-apart sites (`sites`); a failure here restarts it from its last checkpoint,
    and the others go on.

    none: the first failure ends the run.
    """
    replica_groups: AutoInt = AUTO
    """elastic: replica groups, each a set of processes with the whole model in a layout of its own; auto is
    `layout.dp_replicate` if that is given, else 2 (the planner tries several).

    On several nodes each replica group takes whole nodes, or several share one. The first node, which runs the
    supervisor and the rendezvous server, must not be lost."""
    min_groups: PositiveInt = 1
    """elastic: with fewer replica groups than this the run waits; if none can come back, it ends."""
    max_restarts_per_hour: NonNegativeInt = 6
    """The limit for each replica group (elastic) or the whole run (restart, sites); a group that fails more often stays
    down."""
    hang_floor_s: PositiveFloat | None = 120.0
    """A step that takes this long, and five times as long as the slowest before it, has hung; it ends the run with the
    ranks' stacks. null waits forever."""
    first_step_s: PositiveFloat | None = 1800.0
    """The first steps, which compile and connect, may take this long each: before there are three to learn from, and
    after an evaluation. After that the run ends with exit code 5, and says which rank waits for what. null waits
    forever."""
    heartbeat_timeout_s: PositiveFloat = 3.0
    """elastic, sites: a replica group, or a site, silent for this long counts as dead (its node is off, cut off, or its
    process stopped).

    A killed one is noticed at once, by its closed connection. Heartbeats come from a Python thread, which a native call
    that holds the interpreter lock delays."""
    exchange_timeout_s: PositiveFloat = 60.0
    """elastic: how long a gradient exchange waits for a replica group that is alive but does not take part."""
    sdc_check: PositiveInt | None = None
    """elastic: steps between comparisons of the groups' parameters (silent data corruption); null never compares."""
    sites: SitesSpec = field(default_factory=SitesSpec)
    """sites: what they exchange, and when."""

    @property
    def is_one_of_several(self) -> bool:
        """Return whether other runs train with this one, which then restarts by itself."""
        return self.mode == "sites"

    @property
    def keeps_layout(self) -> bool:
        """Return whether what takes part exchanges its state part by part, and so keeps the layout it begins with."""
        return self.mode in ("elastic", "sites")
