"""What tiers hold, for people: names and surveys."""
