"""Where the processes of a job run: on this node, or on several."""
