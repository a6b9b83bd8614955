"""The description of a job: its command, environment, folder and origin."""
