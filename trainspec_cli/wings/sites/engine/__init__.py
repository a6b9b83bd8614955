"""The workers of a run that is one of several far-apart sites."""
