"""The planner calibrated for a cluster, by what was measured there."""
