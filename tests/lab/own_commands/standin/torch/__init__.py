"""Stands for torch, which takes seconds to import: its optimizers alone."""
