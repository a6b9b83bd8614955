"""Compose recipe text into a plain dict with the file and line of every value. `structure` interprets the values."""
