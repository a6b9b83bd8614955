"""The part of the emulated accelerator that runs in the workers."""
