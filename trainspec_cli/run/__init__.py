"""Turn a plan into processes: write the run folder, start torchrun, and supervise it until no process is left. Does not
import torch."""
