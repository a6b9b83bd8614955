"""The commands of the certify plug-in, one per file."""
