"""Reading a run folder back: what happened, where the time went, and how to show it. Torch-free."""
