"""Plans on a cluster of several pools of nodes, each with its own accelerator."""
