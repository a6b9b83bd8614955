"""Whether the hosts of a job are fit: what each has and can do, what they reach of one another, and who is slowest."""
