"""Examine a job's nodes: their hardware and capabilities, the speed of their links, and which is slowest."""
