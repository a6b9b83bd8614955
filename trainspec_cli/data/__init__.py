"""Conversion of text and images to token shards; tokenizers; import and export of other tools' weights."""
