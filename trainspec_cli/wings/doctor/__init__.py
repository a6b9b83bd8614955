"""Examine the nodes of a job: their hardware and capabilities, their link speeds, and which node is slowest."""
