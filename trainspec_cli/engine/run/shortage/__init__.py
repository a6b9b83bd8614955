"""Memory that ran out: the error, the state saved then, and the setting that takes less."""
