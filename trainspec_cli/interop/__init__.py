"""Other engines' configurations: written from a plan, and read into a recipe. No engine is imported."""
