"""Prepare a recipe: load, complete and migrate it, and prepare its data."""
