"""The parts of the live scheduler outside the engine, and simulations of how much time its decisions save on a
disturbed cluster."""
