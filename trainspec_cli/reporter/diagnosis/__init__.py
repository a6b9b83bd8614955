"""The evidence for a diagnosis: the events of a run's folder, live and afterwards; and a trace of its ranks."""
