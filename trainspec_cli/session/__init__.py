"""The steps from a command line to a run that has ended, for launch, resume, a Slurm job and every node."""
