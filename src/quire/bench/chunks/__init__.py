"""What `quire bench chunks` measures: passages that are reused where they stand, beside computing all of it."""
