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
NodeLossResponse = Literal["continue", "wait", "end"]
SiteFormat = Literal["int4", "int8", "bf16"]
FIRST_SITE = 0
"""Number of the site that runs the meeting point: the server through which sites exchange their progress."""


@dataclass(frozen=True)
class SitesSpec:
    """Training at distant sites (`mode` sites). Each site is a separate run of the same recipe, except for `site`,
    `batching` and `cluster`. The sites exchange their progress as outer gradients, one model fragment at a time
    (Streaming DiLoCo, arXiv:2501.18512)."""

    count: PositiveInt = 2
    """Number of sites at the start; training starts once all of them have connected."""
    site: NonNegativeInt | None = None
    """The number of this site, starting at 0, set in each site's command. Site 0 runs the meeting point: if it is down,
    the others train until their next exchange and wait for it there."""
    endpoint: str | None = None
    """HOST:PORT at which all sites can reach the meeting point."""
    listen: str | None = None
    """HOST:PORT at which this site (not site 0) listens for the others' outer gradients. The other sites and its own
    ranks must be able to reach it. null: outer gradients pass through the meeting point."""
    secret: str | None = None
    """The file of 32 random bytes that all sites share and that nobody else may read. All nodes of a site read it from
    the same path."""
    interval_steps: PositiveInt = 100
    """Number of steps between two exchanges of a fragment (H)."""
    fragments: PositiveInt = 4
    """Number of model parts that are exchanged in turn; with 4, each part contains every fourth layer. `interval_steps`
    must be a multiple of this number."""
    delay_steps: NonNegativeInt = 5
    """Number of steps between sending a sum and applying it (tau), during which training continues; at most
    `interval_steps` / `fragments`."""
    format: SiteFormat = "int4"
    """The wire format of outer gradients. They are summed in fp32, and the rounding error is carried over to the next
    exchange."""
    keep: Fraction | None = None
    """Fraction that a site's own weights contribute when an exchange mixes them with the shared ones (Streaming DiLoCo:
    0.5). null: a site's weights move by the same amount as the shared ones, so the site keeps all progress that it has
    not sent yet."""
    outer_lr: PositiveFloat = 1.0
    """The learning rate of the outer optimizer (SGD with Nesterov momentum)."""
    outer_momentum: Annotated[float, Range(0, 1, includes_high=False)] = 0.5
    """The momentum of the outer optimizer."""
    quorum: PositiveInt = 1
    """Minimum number of sites needed to complete an exchange; with fewer, the sites wait."""
    grace_s: NonNegativeFloat = 30.0
    """Time that an exchange with a quorum waits for late sites that are connected. A site that is late twice in a row
    is excluded until it has caught up."""
    link_gbit_s: PositiveFloat | None = None
    """Bandwidth of each site's link in each direction, for `trainspec plan`; null: plans ignore the exchanges."""
    link_delay_s: NonNegativeFloat = 0.05
    """One-way delay between two sites, for `trainspec plan`."""


@dataclass(frozen=True)
class ResilienceSpec:
    mode: RecoveryMode = "restart"
    """restart: a failure ends all processes, and the run restarts from its last checkpoint.

    elastic: the surviving replica groups continue, and the failed one restarts and heals from them.

    sites: this run is one of several distant sites (`sites`); a failure restarts it from its last checkpoint, and the
    others continue.

    none: the first failure ends the run.
    """
    replica_groups: AutoInt = AUTO
    """elastic: number of replica groups, each of which is a set of processes that holds the full model in its own
    layout. auto is `layout.dp_replicate` if that is set, otherwise 2 (the planner tries several numbers).

    On several nodes, each replica group takes entire nodes, or several groups share one node. If the first node is
    lost, which runs the supervisor and the rendezvous server, all groups restart from the newest checkpoint."""
    min_groups: PositiveInt = 1
    """elastic: with fewer replica groups than this, the run waits; if no group can return, it ends."""
    max_restarts_per_hour: NonNegativeInt = 6
    """Maximum number of restarts per hour of each replica group (elastic) or of the run (restart, sites). A group that
    fails more often stays down."""
    after_node_loss: NodeLossResponse = "continue"
    """restart, on several nodes without Slurm: what happens when a node is lost.

    continue: the run restarts with a connected spare node or, without one, on fewer nodes, and returns to all nodes
    when the lost one or a replacement is connected. If no layout fits fewer nodes, it waits.

    If node 0 is lost, the node with the lowest number takes over its tasks (also with elastic).

    wait: it restarts with a connected spare node or, without one, when the lost node or a replacement has connected,
    within `run.join_timeout_s`. If node 0 is lost, it ends.

    end: it ends with exit code 5. A Slurm job always ends, and is requeued without the node.
    """
    standby: bool = True
    """On several nodes (Linux): each node and each spare keeps a process ready that has imported torch and the engine,
    so that a restart need not wait for that. It takes about 0.25 GB of host memory and no GPU memory. Not under Slurm,
    where each restart begins with new processes."""
    hang_floor_s: PositiveFloat | None = 120.0
    """A step is treated as hung if it takes at least this long and at least five times as long as the slowest step
    before it. The run then ends and shows the ranks' stacks. null: wait forever."""
    first_step_s: PositiveFloat | None = 1800.0
    """Time limit for each step until three steps have been timed, and for each step after an evaluation, because these
    steps compile code and set up connections. If it is exceeded, the run ends with exit code 5 and reports which rank
    is waiting for what. null: wait forever."""
    heartbeat_timeout_s: PositiveFloat = 3.0
    """elastic, sites: a replica group or site that is silent for this long is treated as dead (its node is off or
    disconnected, or its process has stopped).

    A killed process is noticed immediately, because its connection closes. Heartbeats come from a Python thread, which
    native calls that hold the interpreter lock can delay."""
    exchange_timeout_s: PositiveFloat = 60.0
    """elastic: time that a gradient exchange waits for a replica group that is alive but does not take part."""
    sdc_check: PositiveInt | None = None
    """elastic: number of steps between comparisons of the groups' parameters (to detect silent data corruption); null:
    never."""
    sites: SitesSpec = field(default_factory=SitesSpec)
    """sites: what the sites exchange, and when."""

    @property
    def survives_lost_nodes(self) -> bool:
        """Return whether a run on several nodes without Slurm restarts after the loss of a node."""
        return self.mode == "restart" and self.after_node_loss != "end"

    @property
    def survives_first_node(self) -> bool:
        """Return whether another node takes over a run on several nodes without Slurm if its first node is lost."""
        return self.mode in ("restart", "elastic") and self.after_node_loss == "continue"

    @property
    def is_one_of_several(self) -> bool:
        """Return whether other runs train together with this one. If so, it restarts independently of them."""
        return self.mode == "sites"

    @property
    def keeps_layout(self) -> bool:
        """Return whether the groups or sites exchange their state part by part, and must therefore keep their initial
        layout."""
        return self.mode in ("elastic", "sites")
