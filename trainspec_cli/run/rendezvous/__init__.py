"""The rendezvous server, through which a job's processes find one another."""
