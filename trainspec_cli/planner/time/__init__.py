"""Step time, by phase."""
