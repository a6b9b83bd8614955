"""Read and write Hugging Face's formats: config.json, safetensors files, tensor names, tokenizers. Does not import
torch."""
