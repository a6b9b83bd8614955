"""Plans, predictions and budgets of loaded recipes."""
