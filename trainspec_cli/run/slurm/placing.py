"""Place a job's nodes beside their neighbours on the same switch, as the plan wants them.

Slurm numbers tasks by the hostfile where it is asked to (`srun --distribution=arbitrary` with SLURM_HOSTFILE), and
tells each task the switches above its node (SLURM_TOPOLOGY_ADDR, under topology/tree); both are documented in srun(1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

HOSTFILE = "SLURM_HOSTFILE"
SEPARATOR = "."


def arrange(addresses: Mapping[str, str], first: str, places: Sequence[int]) -> list[str]:
    """Return the job's nodes by their number. `addresses`: the switches above each node, from the top, and its name.

    `first` gets number 0, since the supervisor runs there. `places`: of each number, among nodes sorted by switch;
    empty: they are numbered in that order.
    """
    standing = sort_by_switch(addresses, first)
    return [standing[place] for place in places] if places else standing


def sort_by_switch(addresses: Mapping[str, str], first: str) -> list[str]:
    """Return the nodes in an order that leaves each switch once, with `first` and its neighbours at the beginning.

    Those of one switch stay in the order of `addresses`.
    """
    own = _switches(addresses[first], first)

    def place(node: str) -> tuple[list[tuple[bool, str]], bool]:
        """The node's own switches come first at every tier, then the others by name."""
        above = _switches(addresses[node], node)
        far = [above[: depth + 1] != own[: depth + 1] for depth in range(len(above))]
        return list(zip(far, above, strict=True)), node != first

    return sorted(addresses, key=place)


def has_switches(addresses: Mapping[str, str]) -> bool:
    """Return whether Slurm knows what its nodes are joined by."""
    return any(_switches(address, node) for node, address in addresses.items())


def _switches(address: str, node: str) -> list[str]:
    """`top.leaf1.node7` -> top, leaf1. Without the plugin the address is empty, or the node's name alone."""
    above = address.removesuffix(node).rstrip(SEPARATOR)
    return above.split(SEPARATOR) if above else []
