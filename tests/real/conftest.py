"""Tests on real weights; left out where torch or transformers is missing."""

import gc
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path += [
    str(Path(__file__).parents[1] / folder) for folder in ("differential", "serve", "engines_loop")
]
collect_ignore_glob = [] if find_spec("torch") and find_spec("transformers") else ["test_*.py"]


@pytest.fixture(scope="module", autouse=True)
def _models_go():
    """Drop the models of a file behind its last test: each has up to a gigabyte."""
    yield
    import real_help

    for kept in (real_help._loaded, real_help.plain, real_help._groups):
        kept.cache_clear()
    gc.collect()
