"""Decisions from measured speeds: shares, moved layers, other layouts, nodes to drop, and when each one pays."""
