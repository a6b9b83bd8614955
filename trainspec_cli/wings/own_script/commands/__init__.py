"""The plug-in's commands, with one file each."""
