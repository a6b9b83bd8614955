"""The training engine, which runs in torchrun's workers. It is the only package that imports torch."""
