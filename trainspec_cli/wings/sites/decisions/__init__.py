"""Training at far-apart sites: what is exchanged when, how it is merged, and who takes which samples."""
