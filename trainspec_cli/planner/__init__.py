"""Arithmetic only: what a run will need, before anything runs. No torch."""
