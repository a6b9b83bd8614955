"""Multi-plane fabrics: their sizes, and a simulation by counts of what a loss of their parts costs sprayed traffic."""
