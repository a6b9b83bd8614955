"""Read and write Hugging Face's formats: config.json, safetensors files, names of tensors, tokenizers. Torch-free."""
