"""Text to token shards: sources, held-out split, tokenizer, the folder on disk, the order of samples. Torch-free."""
