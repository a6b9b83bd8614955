"""Build a plan's model and optimizer, and place them in the mesh."""
