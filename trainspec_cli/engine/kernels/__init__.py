"""Other kernels for the models' and the optimizer's operations: plain functions, each the equal of the default's."""
