"""Verdicts on what slows a run, from the evidence of its ranks, as pure functions."""
