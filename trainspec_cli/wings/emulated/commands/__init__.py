"""The commands of the emulated accelerator."""
