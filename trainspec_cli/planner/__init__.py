"""Computes what a run will need before anything runs. Arithmetic only, without torch."""
