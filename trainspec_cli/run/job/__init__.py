"""A job on paper: its command, environment, folder and origin."""
