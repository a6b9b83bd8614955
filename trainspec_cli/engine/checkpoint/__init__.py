"""The run's state on disk: written aside, digested, renamed when whole."""
