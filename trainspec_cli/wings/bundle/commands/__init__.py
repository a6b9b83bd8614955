"""The commands of the bundle plug-in, one per file."""
