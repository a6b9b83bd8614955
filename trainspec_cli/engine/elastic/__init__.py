"""Replica groups that survive one another: who is there, what they exchange, how one heals. torchft's only room."""
