"""Alternative kernels for operations of models and the optimizer: plain functions, equivalent to the defaults."""
