"""Optional parts that the core does not need: each folder is a plug-in that registers what it adds (see
core/wings.py)."""
