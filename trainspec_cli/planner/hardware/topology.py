"""Which links the ranks of a mesh axis speak over."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.planner.hardware.rates import Efficiency, link_bytes_per_s
from trainspec_cli.spec.recipe.cluster import AcceleratorSpec
from trainspec_cli.spec.recipe.layout import Layout

NIC_KIND_RATIO = {"infiniband": 1.0, "roce": 0.92, "efa": 0.8, "omnipath": 0.8, "ethernet": 0.6}
"""What a collective reaches over each kind of network, over InfiniBand."""


@dataclass(frozen=True)
class Fabric:
    """Devices and the links between them."""

    chip: AcceleratorSpec
    num_devices: int
    devices_per_node: int
    scaleup_devices: int
    """Devices that share the fast links."""
    link_gb_per_s: float
    nic_gbit_per_s: float
    """A device's share, one direction."""
    nic_kind: str = "infiniband"
    host_link_gb_per_s: float = 50.0


@dataclass(frozen=True)
class Group:
    """The ranks that take part in one collective, as the network sees them."""

    size: int
    per_domain: int
    """Ranks of the group inside one scale-up domain."""
    link_bytes_per_s: float
    nic_bytes_per_s: float
    """Of one device."""

    @property
    def domains(self) -> int:
        return max(1, -(-self.size // self.per_domain))

    @property
    def crosses(self) -> bool:
        return self.size > self.per_domain


def group_of(fabric: Fabric, size: int, stride: int, eff: Efficiency) -> Group:
    """`size` ranks, `stride` apart in the rank order."""
    per_domain = min(size, max(1, fabric.scaleup_devices // stride))
    nic = eff.nic * NIC_KIND_RATIO.get(fabric.nic_kind, 0.8) * fabric.nic_gbit_per_s / 8 * 1e9
    peers = min(size, per_domain)
    link = link_bytes_per_s(fabric.chip, fabric.link_gb_per_s, peers, eff)
    return Group(size, per_domain, link, max(nic, 1.0))


def axis_groups(layout: Layout, fabric: Fabric, eff: Efficiency) -> dict[str, Group]:
    """The groups of each axis, ranks laid out tp innermost, then cp, dp_shard, dp_replicate, and pp outermost."""
    tp, cp = layout.tp, layout.cp
    inner = tp * cp
    dense = layout.data_parallel_size * cp
    expert_tp = layout.etp
    expert_dp = max(1, layout.data_parallel_size * cp * tp // (layout.ep * expert_tp))
    return {
        "tp": group_of(fabric, tp, 1, eff),
        "cp": group_of(fabric, cp, tp, eff),
        "etp": group_of(fabric, expert_tp, 1, eff),
        "ep": group_of(fabric, layout.ep, expert_tp, eff),
        "dp": group_of(fabric, dense, tp, eff),
        "dp_shard": group_of(fabric, layout.dp_shard * cp, tp, eff),
        "dp_replicate": group_of(fabric, layout.dp_replicate, inner * layout.dp_shard, eff),
        "expert_dp": group_of(fabric, expert_dp, layout.ep * expert_tp, eff),
        "pp": group_of(fabric, layout.pp, inner * layout.data_parallel_size, eff),
    }
