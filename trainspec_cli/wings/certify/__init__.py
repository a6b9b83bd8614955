"""The open training spec and its judge: every clause measured by real runs of the engine, which is not imported."""
