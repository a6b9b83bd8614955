"""Files that others wrote, read within limits of kind, size and depth."""
