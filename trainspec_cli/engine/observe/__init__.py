"""Watching the run: where the time goes, what the device is."""
