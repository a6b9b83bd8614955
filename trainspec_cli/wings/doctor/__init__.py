"""The examination of a job's nodes: what each has and can do, how fast their links are, and which is slowest."""
