"""What trainspec says of a recipe: plan, prediction, probe, forecast."""
