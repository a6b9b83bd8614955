"""Optimizers, which update the parameters."""
