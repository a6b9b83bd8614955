"""Find, follow, diagnose and remove existing runs."""
