"""The live scheduler in the workers: measuring speeds, following directives, and changing the layout between two
steps."""
