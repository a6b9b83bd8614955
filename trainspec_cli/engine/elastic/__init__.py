"""Replica groups that survive one another: who is there, what they exchange, how one heals."""
