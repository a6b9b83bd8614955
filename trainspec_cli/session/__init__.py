"""What launch, resume, a Slurm job and every node of a run share: from a command line to a run that has ended."""
