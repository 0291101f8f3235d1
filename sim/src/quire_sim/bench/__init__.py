"""The rows of `quire bench serve`: many requests at once, in one process and over HTTP."""
