"""The search over layouts."""
