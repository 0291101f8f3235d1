"""Many records at a time: runs of bounded size, and buffers of one piece."""

import numpy as np
import pytest

pytest.importorskip("xxhash")

from quire.tiers.contents.batches import batches, carved


def test_buffers_of_one_piece_are_apart_and_large_ones_lie_on_pages():
    sizes = [128, 70_000 // 4096 * 4096 + 4096, 64, 0, 1 << 20, 192]
    buffers = carved(sizes)
    assert list(map(len, buffers)) == sizes
    for number, buffer in enumerate(buffers):
        buffer[:] = bytes([number + 1]) * len(buffer)
    assert [set(buffer) for buffer in buffers] == [{1}, {2}, {3}, set(), {5}, {6}]
    for index in (1, 4):
        assert np.frombuffer(buffers[index], np.uint8).ctypes.data % 4096 == 0


def test_batches_are_bounded_in_bytes_and_in_number(monkeypatch):
    monkeypatch.setattr("quire.tiers.contents.batches.BATCH_RECORDS", 3)
    found = list(batches("abcdefgh", [1, 1, 1, 1, 9, 30, 1, 1], 10))
    assert found == [(3, "abc"), (5, "de"), (6, "f"), (8, "gh")]
    assert list(batches("", [])) == []
