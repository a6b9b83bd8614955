"""Certification against the open training spec. Every clause is measured in real runs of the engine, which is not
imported."""
