"""Results that commands exchange and print: plan, prediction, probe, forecast."""
