"""The samples of each step: batch size over the run, distribution over ranks, gradient noise and learning rate."""
