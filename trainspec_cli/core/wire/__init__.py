"""Authenticated connections between the processes of a job: both ends prove that they know the job's secret."""
