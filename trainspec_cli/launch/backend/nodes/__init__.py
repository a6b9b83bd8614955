"""A job on several hosts: an agent on each runs torchrun there; the hub, beside the first, hears and ends them all."""
