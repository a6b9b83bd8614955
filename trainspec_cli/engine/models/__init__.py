"""Models as plain modules. They publish their blocks as data and know nothing about layouts."""
