"""What lies in fixed slots: where each key is, and which was used longest ago."""
