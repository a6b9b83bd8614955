"""Frozen dataclasses that describe a run, its rules and its results. They do not import torch, and every other package
may import them."""
