"""A recipe made ready: loaded, completed, imported, migrated, with its data."""
