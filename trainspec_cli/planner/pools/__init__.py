"""A cluster of several pools of nodes, each with its own accelerator: layouts over all of them, and over each alone."""
