"""The rates that chips, links and networks reach in practice."""
