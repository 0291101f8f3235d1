"""Lets tests in all folders import the helpers beside this file, such as `traces`."""

import pytest

from traces import KeptTrace


@pytest.fixture(scope="module")
def kept():
    """Return whole traces by name, each read once per file of tests."""
    traces = {}

    def read(name):
        if name not in traces:
            traces[name] = KeptTrace(name)
        return traces[name]

    return read
