"""How the ranks meet and what they send one another: process groups, collectives, values as JSON, joint errors."""
