"""Plans, predictions and budgets of recipes that are loaded."""
