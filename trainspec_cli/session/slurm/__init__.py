"""Runs and commands as Slurm jobs."""
