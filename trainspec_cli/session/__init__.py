"""The steps from a command line to a finished run, for launch, resume, a Slurm job and every node."""
