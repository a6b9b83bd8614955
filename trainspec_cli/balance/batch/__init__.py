"""The samples of each step: batch size over the run, gradient noise, learning rate, and distribution among ranks."""
