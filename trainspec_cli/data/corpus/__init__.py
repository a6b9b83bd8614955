"""Conversion of text to token shards (sources, held-out split, tokenizer, folders on disk, order of samples), and
labelled images."""
