"""Outputs of a plan for people and programs: text, page and JSON."""
