"""What the trunk does without: each folder is a wing, which registers what it adds (see core/wings.py)."""
