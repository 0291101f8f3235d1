"""What tiers hold, for people: names, surveys, export and import."""
