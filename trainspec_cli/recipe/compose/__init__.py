"""Compose recipe text into a plain dict with the file and line of every value. `records` interprets the values."""
