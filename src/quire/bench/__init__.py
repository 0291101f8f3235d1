"""Measurements of quire and of the systems it is compared with."""
