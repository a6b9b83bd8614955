"""The engine: what torchrun's workers run. The only room that imports torch."""
