"""A command of the user's own, run as it is: its job, the steps that it counts, its usage, its hangs, and its end."""
