"""One table for each engine, which maps keys of the recipe to keys of the engine."""
