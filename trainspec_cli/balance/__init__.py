"""The live scheduler (outside the engine), and simulations of how much time its decisions recover on a disturbed
cluster."""
