"""Where the processes of a job find one another."""
