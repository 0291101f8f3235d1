"""Fixtures of the simulator's tests."""

import functools

import pytest
from traces_read import KeptTrace


@pytest.fixture(scope="module")
def kept():
    """Return whole traces by name, each read once per file of tests."""
    return functools.cache(KeptTrace)
