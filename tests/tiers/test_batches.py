"""Many records at a time: runs of bounded size."""

import pytest

pytest.importorskip("xxhash")

from quire.tiers.contents.batches import batches


def test_batches_are_bounded_in_bytes_and_in_number():
    found = list(batches("abcdefgh", [1, 1, 1, 1, 9, 30, 1, 1], 10, 3))
    assert found == ["abc", "de", "f", "gh"]
    assert list(batches("", [])) == []
