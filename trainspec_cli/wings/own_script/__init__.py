"""Run a user's training command unchanged: its job, counted steps, resource usage, hangs, and how it ends."""
