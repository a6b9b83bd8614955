"""Compose recipe text into a plain dict with the file:line of every value. `spec` interprets the values."""
