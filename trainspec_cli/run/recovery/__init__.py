"""Decisions after failures: the state machine, what takes less memory, quorum, hangs, leaks, checkpoint intervals."""
