"""Replica groups that survive failures of other groups: which groups take part in a step, what they exchange, and how a
group heals."""
