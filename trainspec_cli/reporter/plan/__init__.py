"""A plan for people and programs: text, page, JSON."""
