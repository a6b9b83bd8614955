"""The workers' part of the live scheduler: it measures speeds, follows directives, and changes the layout between two
steps."""
