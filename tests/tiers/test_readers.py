"""Tiers that are looked at: what they show, and that they change nothing."""

import time

import pytest
from dict_tier import DictTier
from prefixes_help import FULL, hashes_of, sealed, store

from quire.errors import TierError
from quire.tiers.base import Outcome
from quire.tiers.contents.readers import ReadOnlyView
from quire.tiers.files import Files
from quire.tiers.files.room import file_of
from quire.tiers.format import new_buffer

BLOCKS = hashes_of(range(24))


@pytest.fixture
def keys(tmp_path):
    with Files(tmp_path) as tier:
        return store(tier, FULL, BLOCKS)


def read(tier, keys, size=448):
    return tier.get(keys, [new_buffer(size) for _ in keys])


def tree(path):
    return {each: (each.stat().st_mtime_ns, each.read_bytes()) for each in path.rglob("*.quire")}


def test_files_are_read_and_listed_as_the_tier_lists_them(keys, tmp_path):
    with Files(tmp_path, read_only=True) as reader, Files(tmp_path) as tier:
        assert list(reader.scan()) == list(tier.scan())
        assert reader.scan().__next__().key == keys[0]
        assert read(reader, keys) == [Outcome.HIT] * 6
        assert reader.contains([keys[0], bytes(32)]) == [True, False]


def test_a_reader_reports_a_damaged_record_and_leaves_it(keys, tmp_path):
    path = file_of(str(tmp_path), keys[2])
    data = bytearray(open(path, "rb").read())  # noqa: PTH123, SIM115
    data[300] ^= 1
    with open(path, "wb") as file:  # noqa: PTH123
        file.write(data)
    before = tree(tmp_path)
    with Files(tmp_path, read_only=True) as reader:
        assert read(reader, keys)[2] is Outcome.CORRUPT
    assert tree(tmp_path) == before


def test_nothing_is_stored_or_deleted(keys, tmp_path):
    before = tree(tmp_path)
    key, record = sealed(FULL, bytes(32))
    with Files(tmp_path, read_only=True) as reader:
        assert reader.put([key], [record]) == [Outcome.SKIPPED]
        reader.delete(keys)
        reader.touch(keys)
    assert tree(tmp_path) == before


def test_a_reader_reports_deleted_records_absent_and_other_sizes_foreign(keys, tmp_path):
    with Files(tmp_path, read_only=True) as reader:
        with Files(tmp_path) as tier:
            tier.delete(keys[:1])
        assert read(reader, keys[:1]) == [Outcome.ABSENT]
        assert read(reader, keys[1:2], 64) == [Outcome.FOREIGN]


def test_a_directory_that_is_not_there_is_said(tmp_path):
    with pytest.raises(TierError, match="cannot list"):
        Files(tmp_path / "gone", read_only=True)


def test_any_tier_is_read_without_being_changed(caplog):
    tier = DictTier()
    keys = store(tier, FULL, BLOCKS)
    record = bytearray(tier.records[keys[1]])
    record[300] ^= 1
    tier.records[keys[1]] = bytes(record)
    with ReadOnlyView(tier) as reader:
        assert read(reader, keys[:3]) == [Outcome.HIT, Outcome.CORRUPT, Outcome.HIT]
        assert reader.put([keys[0]], [memoryview(tier.records[keys[0]])]) == [Outcome.SKIPPED]
        assert reader.contains([keys[1], bytes(32)]) == [True, False]
        assert list(reader.scan()) == list(tier.scan())
        assert reader.stats().num_records == 6
    assert tier.records[keys[1]] == bytes(record)
    assert not caplog.records


def test_dropping_what_is_damaged_has_what_is_left_of_the_time_of_the_read():
    class Slow(DictTier):
        drops_damaged = False

        def _get(self, keys, buffers, timeout_s, answers):
            time.sleep(0.2)
            super()._get(keys, buffers, timeout_s, answers)

        def _delete(self, keys, timeout_s):
            self.had_s = timeout_s

    tier = Slow()
    (key,) = store(tier, FULL, BLOCKS[:1])
    tier.records[key] = tier.records[key][:-1] + b"x"
    assert tier.get([key], [new_buffer(448)], timeout_s=20.0) == [Outcome.CORRUPT]
    assert 0.0 < tier.had_s <= 19.8


def test_a_tier_in_use_warns_of_damage_each_time_that_there_is_twice_as_much(caplog):
    tier = DictTier("shelf")
    for number in range(1, 9):
        (key,) = store(tier, FULL, BLOCKS[:1])
        record = bytearray(tier.records[key])
        record[300] ^= 1
        tier.records[key] = bytes(record)
        assert read(tier, [key]) == [Outcome.CORRUPT]
        assert not tier.records
        said = [each.getMessage() for each in caplog.records if each.name == "quire.tiers.base"]
        assert len(said) == number.bit_length()
    assert said[-1].startswith(
        f"shelf has given 8 damaged records so far, the last of key {key.hex()}"
    )
