"""Fit the planner to one cluster from a few of its runs: what to run, what follows, and how surely."""
