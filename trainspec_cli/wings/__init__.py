"""Optional plug-ins, one per folder, which the core does not need. Each registers what it adds (see core/wings.py)."""
