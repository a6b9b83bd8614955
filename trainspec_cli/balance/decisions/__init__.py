"""Decisions from measured speeds: sample shares, moving layers, other layouts, nodes to drop, and when each one pays
off."""
