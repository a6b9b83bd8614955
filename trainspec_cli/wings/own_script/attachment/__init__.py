"""What a training script of the user's own asks of the run that it is part of: `from trainspec_cli import attach`."""
