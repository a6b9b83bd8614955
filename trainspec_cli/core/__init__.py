"""What all other parts need: errors, units, bounded readers, trust, and one authenticated channel."""
