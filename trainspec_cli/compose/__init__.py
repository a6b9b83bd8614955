"""Recipe text -> plain dict with the file:line of every value. Knows no meanings: those are `spec`'s."""
