"""Fixtures of the simulator's tests."""

import functools

import pytest


@pytest.fixture(scope="module")
def kept():
    """Return whole traces by name, each read once per file of tests."""
    from traces_read import (
        KeptTrace,
    )  # not above: this file is read where the simulator is not installed, too

    return functools.cache(KeptTrace)
