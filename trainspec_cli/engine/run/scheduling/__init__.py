"""The live scheduler in the workers: measured speeds, directives, and layouts changed between two steps."""
