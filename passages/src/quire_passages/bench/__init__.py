"""Measurements of `quire bench passages`: reused passages compared with full prefill."""
