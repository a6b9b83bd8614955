"""The samples of each step: batch size over the run, division over ranks, gradient noise and learning rate."""
