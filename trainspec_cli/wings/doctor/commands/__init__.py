"""The wing's commands, one file each."""
