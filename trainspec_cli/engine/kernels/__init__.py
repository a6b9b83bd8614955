"""Alternative kernels for operations of models and the optimizer: plain functions that are equivalent to the default
ones."""
