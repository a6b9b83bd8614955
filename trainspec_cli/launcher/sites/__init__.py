"""The meeting point of far-apart sites, which runs beside the supervisor of site 0."""
