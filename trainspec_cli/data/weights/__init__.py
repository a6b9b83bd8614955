"""Weights as other projects keep them: torch's distributed checkpoints (DCP), torchtitan, litgpt and Megatron."""
