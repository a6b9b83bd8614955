"""A run: the trainer and what it assembles from the other folders."""
