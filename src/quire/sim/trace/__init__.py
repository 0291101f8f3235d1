"""Traces: requests as they arrived, from any of the formats people have."""
