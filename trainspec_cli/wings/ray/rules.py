"""What a recipe with `cluster.manager=ray` needs. This module does not load Ray."""

PACKAGES = (("cluster.manager", "ray", "ray", "ray"),)
