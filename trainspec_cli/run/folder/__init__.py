"""The run folder as a protocol: who writes which file, and how it is read back. Torch-free."""
