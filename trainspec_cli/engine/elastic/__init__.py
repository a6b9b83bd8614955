"""Replica groups that survive failures of others: who takes part in a step, what they exchange, how a group heals."""
