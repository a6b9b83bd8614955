"""One table for each engine: which of its keys says what a key of the recipe says."""
