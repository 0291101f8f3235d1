"""Lets tests in all folders import the helpers beside this file, and skips what lacks a server here."""

import functools
from collections import Counter

import pytest

import system
from traces import KeptTrace

RUNS = Counter()
"""How many tests that need a server or system library ran, by its name; and how many were skipped for it."""


def pytest_addoption(parser):
    say = "fail, instead of skipping, where a server or system library is missing"
    parser.addoption("--require-system", action="store_true", help=say)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    for name in [name for mark in item.iter_markers("system") for name in mark.args]:
        reason = system.missing(name)
        RUNS[name, "skipped" if reason else "ran"] += 1
        if reason and item.config.getoption("--require-system"):
            pytest.fail(reason, pytrace=False)
        if reason:
            pytest.skip(reason)


def pytest_terminal_summary(terminalreporter):
    for name in system.NEEDS:
        ran, skipped = RUNS[name, "ran"], RUNS[name, "skipped"]
        if ran or skipped:
            why = f": {system.missing(name)}" if skipped else ""
            terminalreporter.write_line(f"need {name}: {ran} ran, {skipped} skipped{why}")


@pytest.fixture(scope="module")
def kept():
    """Return whole traces by name, each read once per file of tests."""
    return functools.cache(KeptTrace)
