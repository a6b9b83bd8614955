"""Diagnose a run from the events in its folder, while it runs or afterwards, and write a trace of its ranks."""
