"""Optional parts that the trunk does not need: each folder is a wing that registers what it adds (see
core/wings.py)."""
