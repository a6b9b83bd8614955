"""The rates that chips, links and networks achieve in practice."""
