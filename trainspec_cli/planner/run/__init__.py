"""The whole run: failures, goodput, energy, carbon and money."""
