"""Before a run starts, predict what it will need. This uses only arithmetic, without torch."""
