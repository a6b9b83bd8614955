"""The communication blueprint: which exchange crosses which tier, by which algorithm, and where nodes are placed."""
