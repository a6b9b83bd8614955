"""What every room needs: errors, units, bounded readers, trust, and one authenticated channel."""
