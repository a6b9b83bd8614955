"""Optimizers, which move the parameters."""
