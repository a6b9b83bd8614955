"""Reads a run folder and shows what happened and where the time went. Does not import torch."""
