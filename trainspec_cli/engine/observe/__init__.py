"""Observe a run: step times, device, memory, hangs, and trackers."""
