"""Hugging Face's formats, in and out: config.json, safetensors files, names of tensors, tokenizers. Torch-free."""
