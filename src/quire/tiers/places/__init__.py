"""What lies in fixed places: where each key is, and which was used longest ago."""
