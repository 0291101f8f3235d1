"""Fixed places: the one of each key, and those used longest ago."""
