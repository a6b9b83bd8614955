"""The time of a step, by phase."""
