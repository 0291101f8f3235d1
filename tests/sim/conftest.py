"""Fixtures of the simulator's tests, which load where it is not installed, too."""

import functools

import pytest


@pytest.fixture(scope="module")
def kept():
    """Return whole traces by name, each read once per file of tests."""
    from traces_read import KeptTrace

    return functools.cache(KeptTrace)
