"""Frozen dataclasses for the recipe and the results of a run, and the rules that a recipe must satisfy. Every other
package may import this one. It does not import torch."""
