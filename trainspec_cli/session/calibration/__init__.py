"""Calibrate the planner for a cluster, using measurements from that cluster."""
