"""The nouns that a recipe says."""
