"""Conversion of text and images to token shards; tokenizers; import and export of weights in the formats of other
tools."""
