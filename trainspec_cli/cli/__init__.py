"""The command line: one file per command. Parse, make one call, print."""
