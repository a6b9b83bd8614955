"""Pages that need nothing else: charts are inline, light and dark follow the reader's system."""
