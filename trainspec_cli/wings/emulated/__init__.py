"""An accelerator in software, on which the engine's accelerator path runs without a GPU."""

KIND = "emulated"
"""torch's name of the device: `torch.device("emulated", 0)`."""
