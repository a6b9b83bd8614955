"""The trainer, and the components that it assembles for a run."""
