"""The nouns: frozen dataclasses that say what a run is. Torch-free; imported by every room."""
