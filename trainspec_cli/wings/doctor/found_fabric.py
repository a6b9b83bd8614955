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
    """GPU0, GPU1, ... in the order of their PCI addresses."""
    links: dict[str, str] = field(default_factory=dict)
    """Name of each other GPU -> the link to it."""
    nics: dict[str, str] = field(default_factory=dict)
    """Name of each RDMA NIC -> the link to it."""
    cores: str = ""
    """The nearest cores in the kernel's list format (`0-15,64-79`); "" if unknown."""
    numa_node: int | None = None
    pcie_gbit_per_s: float | None = None
    """The rate of its PCIe link in one direction; None if unknown."""


@dataclass(frozen=True)
class Nic:
    """An RDMA NIC with an active port, or a network interface that is up."""

    name: str
    gbit_per_s: float | None
    """The total rate of its active ports; None if unknown."""
    numa_node: int | None = None
    """None if unknown."""
    kind: NetworkKind = "infiniband"
    pci_path: tuple[str, ...] = ()
    """The PCI addresses on the path from the host bridge to it."""


@dataclass(frozen=True)
class NumaNode:
    number: int
    cores: str
    """Its cores in the kernel's list format: `0-15,64-79`."""
    memory_bytes: int | None = None


@dataclass(frozen=True)
class FabricFact:
    """Something that was found, or that was searched for and not found."""

    about: str
    """gpus, rails, nics, numa, switches or measured."""
    found: str
    source: str
    """The command, file or folder from which it was read."""


@dataclass(frozen=True)
class FoundTier:
    spec: TierSpec
    source: str
    left_out: dict[str, str] = field(default_factory=dict)
    """Each unknown key -> the default used without it, and the value to write."""


@dataclass(frozen=True)
class FoundFabric:
    host: str
    """The node's name, or the file that describes it."""
    devices_per_node: int
    tiers: tuple[FoundTier, ...]
    """Innermost first."""
    facts: tuple[FabricFact, ...]
    gpus: tuple[FoundGpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    numa_nodes: tuple[NumaNode, ...] = ()
    remarks: tuple[str, ...] = ()
    """Notes for users of the fabric in a plan."""

    def spec(self, name: str) -> FabricSpec:
        """Return the fabric as in a recipe."""
        sources = {f"tiers.{index}": tier.source for index, tier in enumerate(self.tiers)}
        return FabricSpec(name, tuple(tier.spec for tier in self.tiers), sources=sources)

    def as_json(self) -> JsonObject:
        return to_plain(self)
