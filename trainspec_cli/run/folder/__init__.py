"""The run folder as a protocol: which process writes which file, and how it is read back. Does not import torch."""
