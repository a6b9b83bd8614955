"""Plan -> processes: the run folder is written, torchrun started and watched until nothing is left. Torch-free."""
