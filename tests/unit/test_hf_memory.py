"""The table that says which layer group has what of the memory."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from quire.core import FullAttention, SlidingWindow
from quire.engines.hf.memory import GroupMemory, memory_table
from quire.engines.hf.memory import _words as words


def test_kinds_are_told_without_what_is_not_set():
    assert words(FullAttention()) == "FullAttention"
    assert words(SlidingWindow(8)) == "SlidingWindow(window=8)"
    assert words(SlidingWindow(8, 2, 64)) == "SlidingWindow(window=8, sinks=2, interval=64)"


def test_a_table_has_a_line_for_each_group():
    groups = [
        GroupMemory("full", "FullAttention", 5, 2048, 12_000, 1, 2, 3, 0.75),
        GroupMemory("recurrent", "Recurrent", 12, 4 << 20, 30, 30, 0, 0, 0.25),
    ]
    assert memory_table(groups).splitlines() == [
        "group      kind           layers  bytes/block  blocks  share",
        "full       FullAttention       5      2.0 KiB  12,000    75%",
        "recurrent  Recurrent          12      4.0 MiB      30    25%",
    ]
