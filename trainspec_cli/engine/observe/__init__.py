"""Observation of a run: step time, device, memory, hangs, and trackers."""
