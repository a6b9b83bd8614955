"""The commands of the interop plug-in, one per file."""
