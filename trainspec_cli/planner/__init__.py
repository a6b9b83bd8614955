"""Predicts what a run will need before anything runs. It uses only arithmetic, without torch."""
