"""Plan -> processes: write the run folder, start torchrun, and supervise it until no process is left. Torch-free."""
