"""Communication between ranks: joining the process group, differentiable collectives, exchange of values as JSON, and
shared errors."""
