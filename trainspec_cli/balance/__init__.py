"""The live scheduler outside the engine, and simulations of how much its decisions recover on a disturbed cluster."""
