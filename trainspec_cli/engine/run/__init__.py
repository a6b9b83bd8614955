"""A run: the trainer, and the parts that it assembles from the other folders."""
