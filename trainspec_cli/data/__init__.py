"""Conversion of text to token shards; images; tokenizers; import and export of weights in the formats of other
tools."""
