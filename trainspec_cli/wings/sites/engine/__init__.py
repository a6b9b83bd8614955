"""The workers of one of several distant sites."""
