"""Run a user's training command unchanged: its job, step counts, resource usage, hangs, and how it ends."""
