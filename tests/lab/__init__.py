"""The test lab: a real Slurm, and hosts with cables that can be cut, on one machine."""
