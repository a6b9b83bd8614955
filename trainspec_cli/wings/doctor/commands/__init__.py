"""The commands of the doctor plug-in, one per file."""
