"""The trainer, and the parts of a run that it assembles from the other folders."""
