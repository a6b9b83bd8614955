"""Weights in other projects' formats: torch's distributed checkpoints (DCP), torchtitan, litgpt and Megatron."""
