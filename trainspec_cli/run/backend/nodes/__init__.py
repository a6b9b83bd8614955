"""A job on several nodes: an agent on each node runs torchrun there, and the backend controls the agents through its
hub."""
