"""Optimizers, including trainspec's implementations of 8-bit AdamW and Muon."""
