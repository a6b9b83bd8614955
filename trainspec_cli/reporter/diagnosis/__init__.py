"""Diagnose a run from the events of its folder, during and after it; and draw a trace of its ranks."""
