"""Diagnose a run from the events in its folder, during or after the run, and write a trace of its ranks."""
