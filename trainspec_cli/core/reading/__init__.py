"""Read files written by other programs, within limits on type, size and depth."""
