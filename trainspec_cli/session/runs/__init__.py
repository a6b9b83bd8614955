"""Runs that are there already: found, followed, diagnosed, removed."""
