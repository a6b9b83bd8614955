"""Runs that start and go on: launch, resume, run, sweeps, and what each start checks before its workers."""
