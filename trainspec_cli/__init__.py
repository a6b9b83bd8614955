"""trainspec: a launcher, planner and engine for training large models under an open training spec."""

__version__ = "0.1.0"
