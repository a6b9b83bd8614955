"""The links and network found by `trainspec fabric`; `fabric --json` prints these records."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.recipe.keys.cluster import FabricSpec, NetworkKind, TierSpec
from trainspec_cli.recipe.records import to_plain


@dataclass(frozen=True)
class FoundGpu:
    """A GPU and its links to the other devices of its node, named as in `nvidia-smi topo -m` (NV18, PIX, SYS, ...)."""

    name: str
    """GPU0, GPU1, ... in PCI address order."""
    links: dict[str, str] = field(default_factory=dict)
    """Name of each other GPU -> the link to that GPU."""
    nics: dict[str, str] = field(default_factory=dict)
    """Name of each RDMA NIC -> the link to that NIC."""
    cores: str = ""
    """The nearest cores in the kernel's list format (`0-15,64-79`); "" if unknown."""
    numa_node: int | None = None
    pcie_gbit_per_s: float | None = None
    """The rate of the GPU's PCIe link in one direction; None if unknown."""


@dataclass(frozen=True)
class Nic:
    """An RDMA NIC with an active port, or a network interface that is up."""

    name: str
    gbit_per_s: float | None
    """The total rate of the NIC's active ports; None if unknown."""
    numa_node: int | None = None
    """The NUMA node of the NIC; None if unknown."""
    kind: NetworkKind = "infiniband"
    pci_path: tuple[str, ...] = ()
    """The PCI addresses on the path from the host bridge to the NIC."""


@dataclass(frozen=True)
class NumaNode:
    number: int
    cores: str
    """The node's cores in the kernel's list format: `0-15,64-79`."""
    memory_bytes: int | None = None


@dataclass(frozen=True)
class FabricFact:
    """A finding about the fabric, or a failed search for one."""

    about: str
    """The topic: gpus, rails, nics, numa, switches or measured."""
    found: str
    source: str
    """The command, file or folder that was read."""


@dataclass(frozen=True)
class FoundTier:
    spec: TierSpec
    source: str
    left_out: dict[str, str] = field(default_factory=dict)
    """Each unknown key -> the default that applies, and the value to write instead."""


@dataclass(frozen=True)
class FoundFabric:
    host: str
    """The node's name, or the file that describes it."""
    devices_per_node: int
    tiers: tuple[FoundTier, ...]
    """The tiers of the network, innermost first."""
    facts: tuple[FabricFact, ...]
    gpus: tuple[FoundGpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    numa_nodes: tuple[NumaNode, ...] = ()
    remarks: tuple[str, ...] = ()
    """Remarks for plans that use this fabric."""

    def spec(self, name: str) -> FabricSpec:
        """Return the fabric in the form that recipes use."""
        sources = {f"tiers.{index}": tier.source for index, tier in enumerate(self.tiers)}
        return FabricSpec(name, tuple(tier.spec for tier in self.tiers), sources=sources)

    def as_json(self) -> JsonObject:
        return to_plain(self)
