"""Start and continue runs: launch, resume, run, sweeps, and the checks before the workers start."""
