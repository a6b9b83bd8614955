"""The command line, with one file per command. Each parses its arguments, makes one call and prints."""
