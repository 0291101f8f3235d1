"""Many records at a time: runs of bounded size."""

import pytest

pytest.importorskip("xxhash")

from quire.tiers.contents.batches import batches


def test_batches_are_bounded_in_bytes_and_in_number(monkeypatch):
    monkeypatch.setattr("quire.tiers.contents.batches.BATCH_RECORDS", 3)
    found = list(batches("abcdefgh", [1, 1, 1, 1, 9, 30, 1, 1], 10))
    assert found == [(3, "abc"), (5, "de"), (6, "f"), (8, "gh")]
    assert list(batches("", [])) == []
