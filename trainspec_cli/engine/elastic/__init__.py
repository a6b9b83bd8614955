"""Replica groups that survive one another: who takes part in a step, what they exchange, how one heals."""
