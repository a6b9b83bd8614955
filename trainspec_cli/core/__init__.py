"""Code that all other packages need: errors, units, bounded file readers, trust checks, and an authenticated
channel."""
