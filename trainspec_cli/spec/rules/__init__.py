"""What the values of a recipe must satisfy, one by one and together."""
