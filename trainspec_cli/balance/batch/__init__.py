"""The samples of each step: their number over the run, their division over ranks, their noise and learning rate."""
