"""Models as plain modules. They publish their blocks as data and do not depend on layouts."""
