"""The engine, which torchrun's workers run. It is the only package that imports torch."""
