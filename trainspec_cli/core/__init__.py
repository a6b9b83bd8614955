"""What every other part needs: errors, units, bounded readers, trust, and one authenticated channel."""
