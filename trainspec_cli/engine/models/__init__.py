"""Models, as plain modules that declare their blocks and do not depend on layouts."""
