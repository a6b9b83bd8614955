"""The fabric of a machine, discovered: how its GPUs, NICs and nodes are joined."""
