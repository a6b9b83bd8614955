"""The full run: failures, goodput, energy, carbon and money."""
