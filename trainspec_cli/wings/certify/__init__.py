"""The open training spec and its judge: every clause is measured with real runs of the engine, which is not
imported."""
