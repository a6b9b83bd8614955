"""Authenticated connections between the processes of one job: both ends prove that they know its secret."""
