"""The events of a run, as stored in its files."""
