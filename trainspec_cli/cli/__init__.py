"""The command line, with one file per command. Each file parses arguments, makes one call and prints the result."""
