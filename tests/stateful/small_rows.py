"""Arrays of block tables so small that rows move, and grow and shrink them, all the time."""

from unittest import mock

from hypothesis import strategies as st

row_sizes = st.sampled_from([(1, 4), (2, 32), (64, 1 << 16)])
"""(shortest extent, smallest arena); the last one is what managers have."""


def patched_rows(sizes):
    """Return a started patch of these sizes; stop it at the end of the example."""
    extent, arena = sizes
    patch = mock.patch.multiple("quire.core.rows", MIN_EXTENT=extent, MIN_ARENA=arena)
    patch.start()
    return patch
