"""The rendezvous server, through which the processes of a job find one another."""
