"""Read files that other programs wrote, within limits of kind, size and depth."""
