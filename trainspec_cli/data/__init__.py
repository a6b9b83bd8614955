"""Text and images to token shards; tokenizers; weights of other tools, in and out."""
