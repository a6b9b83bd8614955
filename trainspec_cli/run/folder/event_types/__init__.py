"""The events of a run, as its files hold them."""
