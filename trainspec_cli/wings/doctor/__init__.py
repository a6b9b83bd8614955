"""Examine the nodes of a job: their hardware and capabilities, the speed of their links, and which one is slowest."""
