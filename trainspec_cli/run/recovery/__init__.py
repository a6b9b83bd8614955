"""Decisions about failures: the state machine, settings that use less memory, quorum, hangs, leaks, checkpoint
intervals."""
