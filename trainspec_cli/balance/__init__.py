"""The live scheduler beside the engine: what disturbs a cluster, and what the decisions win back of it, simulated."""
