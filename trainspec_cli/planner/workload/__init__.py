"""What a model costs, family by family: parameters and FLOPs."""
