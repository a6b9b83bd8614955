"""The open training spec and its judge. Every clause is measured with real runs of the engine, which is not
imported."""
