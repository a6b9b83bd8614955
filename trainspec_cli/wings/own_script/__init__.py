"""Run a user's training command unchanged, and observe its job, step counts, resource usage, hangs and exit."""
