"""The sections of a recipe, one dataclass each."""
