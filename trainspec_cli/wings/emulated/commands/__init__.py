"""The commands of the emulated plug-in, one per file."""
