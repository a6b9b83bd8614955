"""The rules that a recipe's values must satisfy, individually and in combination."""
