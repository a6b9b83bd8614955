"""The run's state on disk, which is written under a temporary name, digested, and renamed when complete."""
