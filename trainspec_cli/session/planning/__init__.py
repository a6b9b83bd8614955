"""Plans, predictions and budgets for loaded recipes."""
