"""What `trainspec fabric` finds of a machine's links and network; its JSON is what `fabric --json` prints."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.recipe.keys.cluster import FabricSpec, NetworkKind, TierSpec
from trainspec_cli.recipe.records import to_plain


@dataclass(frozen=True)
class FoundGpu:
    """A GPU and its ways to the other devices of its node, as `nvidia-smi topo -m` names them (NV18, PIX, SYS, ...)."""

    name: str
    """GPU0, GPU1, ... in the order of their PCI addresses."""
    links: dict[str, str] = field(default_factory=dict)
    """The link to each other GPU by name."""
    nics: dict[str, str] = field(default_factory=dict)
    """The way to each NIC for RDMA by name."""
    cores: str = ""
    """The cores next to it, as the kernel lists them (`0-15,64-79`); "": not known."""
    numa_node: int | None = None
    pcie_gbit_per_s: float | None = None
    """The rate of its PCIe link, one direction; None: not known."""


@dataclass(frozen=True)
class Nic:
    """A NIC for RDMA with an active port, or a network interface that is up."""

    name: str
    gbit_per_s: float | None
    """The rate of its active ports together; None: the system does not say."""
    numa_node: int | None = None
    """None where the system does not say."""
    kind: NetworkKind = "infiniband"
    pci_path: tuple[str, ...] = ()
    """The PCI addresses from the host bridge down to it."""


@dataclass(frozen=True)
class NumaNode:
    number: int
    cores: str
    """As the kernel lists them: `0-15,64-79`."""
    memory_bytes: int | None = None


@dataclass(frozen=True)
class FabricFact:
    """Something that was found, or looked for and not found."""

    about: str
    """gpus, rails, nics, numa, switches or measured."""
    found: str
    source: str
    """The command, file or folder that says so."""


@dataclass(frozen=True)
class FoundTier:
    spec: TierSpec
    source: str
    left_out: dict[str, str] = field(default_factory=dict)
    """The keys that are not known -> what counts without them, and what to write there."""


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
    """What is to be known before it is planned with."""

    def spec(self, name: str) -> FabricSpec:
        """Return it as a recipe describes a fabric."""
        sources = {f"tiers.{place}": tier.source for place, tier in enumerate(self.tiers)}
        return FabricSpec(name, tuple(tier.spec for tier in self.tiers), sources=sources)

    def as_json(self) -> JsonObject:
        return to_plain(self)
