"""The commands of the own_script plug-in, one per file."""
