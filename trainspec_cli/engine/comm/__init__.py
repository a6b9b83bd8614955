"""Communication of ranks: joining, differentiable collectives, values as JSON, joint errors."""
