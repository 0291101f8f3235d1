"""Tests on real weights; left out where torch or transformers is missing."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("differential", "serve")]
collect_ignore_glob = [] if find_spec("torch") and find_spec("transformers") else ["test_*.py"]
