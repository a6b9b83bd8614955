"""What this project says of a GPU, measured on one: see `__main__.py`."""
