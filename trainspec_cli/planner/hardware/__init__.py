"""What chips, links and networks achieve."""
