"""Decisions on measured speeds: shares, moved layers, other layouts, nodes to leave out, and when each pays."""
