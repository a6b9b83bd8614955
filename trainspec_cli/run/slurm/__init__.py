"""Slurm: the batch script of a run, and the few commands that a job needs."""
