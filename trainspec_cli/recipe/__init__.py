"""Frozen dataclasses that describe a run, its rules and its results. Torch-free; every room may import it."""
