"""One's own code as a recipe names it: found and checked without running it, imported by the workers."""
