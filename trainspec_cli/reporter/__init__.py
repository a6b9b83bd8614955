"""Reads a run folder and shows what happened and where the time went. It does not import torch."""
