"""The rules that a recipe's values must satisfy, one by one and together."""
