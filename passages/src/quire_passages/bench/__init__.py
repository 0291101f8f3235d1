"""Measurements of `quire bench chunks`: reused passages compared with full prefill."""
