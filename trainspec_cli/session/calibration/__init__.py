"""Calibrate the planner for a cluster from measurements there."""
