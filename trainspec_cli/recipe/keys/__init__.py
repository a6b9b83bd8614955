"""The sections of a recipe, with one dataclass for each."""
