"""Communication between ranks: joining, differentiable collectives, values as JSON, and shared errors."""
