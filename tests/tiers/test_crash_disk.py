"""A process that writes to a disk tier is killed; the whole run is `benchmarks/crash_disk.py`."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from turns import few

_PATH = Path(__file__).parents[2] / "benchmarks" / "crash_disk.py"
_SPEC = importlib.util.spec_from_file_location("crash_disk", _PATH)
crash_disk = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(crash_disk)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process to be killed")


@pytest.mark.cases(1)
@pytest.mark.parametrize("kills", few([3, 60], 3))
@pytest.mark.parametrize("mode", crash_disk.MODES)
def test_after_a_kill_all_that_was_stored_is_there_and_nothing_else(mode, kills):
    counts = crash_disk.crash(kills=kills, seed=sys.maxsize, modes=(mode,), seconds=3.0)
    assert counts["kills"] >= 3
    assert counts["right"] > 0
    assert mode == "power" or counts["corrupt"] == 0
