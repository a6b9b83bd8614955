"""Alternative kernels for operations of models and the optimizer, which are plain functions equivalent to the
defaults."""
