"""The interface for training scripts: `from trainspec_cli import attach`."""
