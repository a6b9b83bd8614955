"""The part of the emulated accelerator that runs in worker processes."""
