"""A job on several nodes: an agent on each runs torchrun there, and the backend reaches them through its hub."""
