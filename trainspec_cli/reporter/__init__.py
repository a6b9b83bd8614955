"""Reads a run folder: what happened, where the time went, and how to show it. Imports no torch."""
