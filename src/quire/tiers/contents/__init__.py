"""The contents of tiers, for people: names and surveys."""
