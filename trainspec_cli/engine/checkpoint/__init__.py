"""The run's state on disk: written under a temporary name, digested, and renamed when complete."""
