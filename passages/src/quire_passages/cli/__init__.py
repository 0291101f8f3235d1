"""The commands of passages, found by entry points."""
