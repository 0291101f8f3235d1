"""The contract of every tier, as pytest classes to be bound to one.

    class TestMine(TierContract):
        @pytest.fixture
        def make_tier(self):
            return lambda capacity=None: Mine(capacity or "64MiB")

`make_tier` gives a function that makes a new, empty tier with room for at least 64 MiB; a tier that evicts by itself
is bound to `quire.tiers.contract.BoundedContract` and is made with a capacity in bytes, if one is given.
What it needs (a server, a folder) are fixtures of the subclass. Other hooks are optional: a test without its own skips.

Write `pytest.register_assert_rewrite("quire.tiers.contract.every")` into `conftest.py` to see values where an assertion fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeAlias

import pytest

from quire.errors import ConfigError, RecordError, TierError
from quire.tiers.base import ListedRecord, Outcome, Tier
from quire.tiers.contract.poisoned import PoisonedContract
from quire.tiers.contract.purging import PurgeContract
from quire.tiers.contract.samples import (
    PAYLOADS,
    buffers_like,
    flipped,
    later_version,
    name_of,
    names_of,
    record_of,
    records_of,
)
from quire.tiers.contract.threads import ThreadsContract
from quire.tiers.format import new_buffer, record_bytes

MakeTier: TypeAlias = Callable[..., Tier]

HIT, ABSENT, CORRUPT, FOREIGN = Outcome.HIT, Outcome.ABSENT, Outcome.CORRUPT, Outcome.FOREIGN
STORED, PRESENT, FULL = Outcome.STORED, Outcome.PRESENT, Outcome.FULL


def read(tier: Tier, key: bytes, payload_bytes: int = 1000) -> tuple[Outcome, memoryview]:
    """Get one record; return its outcome and the buffer."""
    buffer = new_buffer(record_bytes(payload_bytes))
    (outcome,) = tier.get([key], [buffer], timeout_s=10)
    return outcome, buffer


class TierContract(ThreadsContract, PurgeContract, PoisonedContract):
    """Holds for every tier."""

    payloads: tuple[int, ...] = PAYLOADS
    """Payload sizes that the tier takes; shorter where it has a limit."""

    @pytest.fixture
    def make_tier(self) -> MakeTier:
        """Return a function that makes a tier. A subclass must give it."""
        raise NotImplementedError

    def reopen(self, tier: Tier) -> Tier:
        """Close the tier and open its remains."""
        pytest.skip(f"{tier.name} does not outlive its process")

    def stalled(self, tier: Tier) -> AbstractContextManager[None]:
        """While entered, the medium below the tier does not answer."""
        pytest.skip(f"{tier.name} waits for nobody")

    def broken(self, tier: Tier) -> AbstractContextManager[None]:
        """While entered, the medium below the tier fails."""
        pytest.skip(f"no way to break what {tier.name} stands on")

    @pytest.fixture
    def tier(self, make_tier: MakeTier) -> Iterator[Tier]:
        """Give an empty tier and close it."""
        with make_tier() as tier:
            yield tier
            tier.check()

    # what was put is got

    def test_a_record_of_any_size_comes_back_byte_for_byte(self, tier: Tier) -> None:
        for number, payload_bytes in enumerate(self.payloads):
            record = record_of(name_of(number), payload_bytes)
            assert tier.put([name_of(number)], [record], timeout_s=10) == [STORED], payload_bytes
        for number, payload_bytes in enumerate(self.payloads):
            outcome, buffer = read(tier, name_of(number), payload_bytes)
            assert outcome is HIT, payload_bytes
            assert buffer == record_of(name_of(number), payload_bytes), payload_bytes

    def test_one_call_takes_many_records_of_mixed_sizes(self, tier: Tier) -> None:
        keys = names_of(range(120))
        records = [record_of(key, 500 + 500 * (i % 3)) for i, key in enumerate(keys)]
        buffers = buffers_like(records)
        assert tier.put(keys, records, timeout_s=10) == [STORED] * 120
        assert tier.contains(keys, timeout_s=10) == [True] * 120
        assert tier.get(keys, buffers, timeout_s=10) == [HIT] * 120
        assert buffers == records

    def test_a_call_without_keys_does_nothing(self, tier: Tier) -> None:
        assert (tier.put([], []), tier.get([], []), tier.contains([])) == ([], [], [])
        tier.touch([])
        tier.lease([], 1.0)
        tier.delete([])

    def test_the_caller_may_reuse_its_buffers_after_a_put_and_after_a_get(self, tier: Tier) -> None:
        key, record = name_of(1), record_of(name_of(1))
        tier.put([key], [record], timeout_s=10)
        record[:] = bytes(len(record))
        outcome, buffer = read(tier, key)
        assert (outcome, buffer) == (HIT, record_of(key))
        buffer[:] = bytes(len(buffer))
        assert read(tier, key) == (HIT, record_of(key))

    @pytest.mark.parametrize("payload_bytes", [1000, 200_000])
    def test_buffers_may_lie_anywhere_and_records_be_read_only(
        self, tier: Tier, payload_bytes: int
    ) -> None:
        key, size = name_of(1), record_bytes(payload_bytes)
        unaligned = memoryview(b"x" + bytes(record_of(key, payload_bytes)))[1:]
        assert tier.put([key], [unaligned], timeout_s=10) == [STORED]
        buffer = memoryview(bytearray(size + 7))[7:]
        assert tier.get([key], [buffer], timeout_s=10) == [HIT]
        assert buffer == unaligned

    def test_a_key_asked_for_twice_in_one_call_is_found_twice(self, tier: Tier) -> None:
        key = name_of(1)
        tier.put([key], [record_of(key)], timeout_s=10)
        buffers = buffers_like([record_of(key)] * 2)
        assert tier.get([key, key], buffers, timeout_s=10) == [HIT, HIT]
        assert buffers == [record_of(key)] * 2

    def test_a_key_put_twice_in_one_call_is_there_once(self, tier: Tier) -> None:
        key = name_of(1)
        assert tier.put([key, key], [record_of(key)] * 2, timeout_s=10) == [STORED, PRESENT]
        assert tier.stats().num_records in (1, -1)

    # what was not put is not got

    def test_absent_keys_are_absent_beside_keys_that_are_there_whatever_is_said_of_them(
        self, tier: Tier
    ) -> None:
        keys = names_of(range(6))
        tier.put(keys[::2], records_of(keys[::2]), timeout_s=10)
        tier.touch(keys)
        tier.lease(keys, 0.01)
        buffers = buffers_like(records_of(keys))
        assert tier.contains(keys, timeout_s=10) == [True, False] * 3
        assert tier.get(keys, buffers, timeout_s=10) == [HIT, ABSENT] * 3
        assert buffers[::2] == records_of(keys[::2])

    def test_a_deleted_key_is_absent_and_may_be_put_again(self, tier: Tier) -> None:
        keys = names_of(range(4))
        tier.put(keys, records_of(keys), timeout_s=10)
        tier.delete([keys[1], name_of(99), keys[2], keys[1]], timeout_s=10)
        assert tier.contains(keys, timeout_s=10) == [True, False, False, True]
        assert read(tier, keys[1])[0] is ABSENT
        assert read(tier, keys[0]) == (HIT, record_of(keys[0]))
        assert tier.put([keys[1]], [record_of(keys[1])], timeout_s=10) == [STORED]
        assert read(tier, keys[1]) == (HIT, record_of(keys[1]))

    def test_a_second_put_says_which_of_the_two_is_kept(self, tier: Tier) -> None:
        key = name_of(1)
        first, second = record_of(key), record_of(key, generation=1)
        tier.put([key], [first], timeout_s=10)
        (outcome,) = tier.put([key], [second], timeout_s=10)
        assert outcome in (STORED, PRESENT)
        assert read(tier, key) == (HIT, second if outcome is STORED else first)

    @pytest.mark.parametrize("other_bytes", [1000, 9000, 200_000])
    def test_a_record_of_another_size_is_foreign_until_a_put_replaces_it(
        self, tier: Tier, other_bytes: int
    ) -> None:
        keys = names_of(range(3))
        tier.put(keys, records_of(keys, 5000), timeout_s=10)
        assert read(tier, keys[1], other_bytes)[0] is FOREIGN
        outcomes = tier.put(keys[1:2], records_of(keys[1:2], other_bytes), timeout_s=10)
        assert outcomes == [STORED]
        assert read(tier, keys[1], other_bytes) == (HIT, record_of(keys[1], other_bytes))
        assert read(tier, keys[1], 5000)[0] is FOREIGN
        assert read(tier, keys[2], 5000) == (HIT, record_of(keys[2], 5000))

    # bad arguments change nothing

    def test_bad_arguments_raise_before_anything_is_done(self, tier: Tier) -> None:
        good, other = record_of(name_of(1)), record_of(name_of(2))
        keys = [name_of(1), name_of(2)]
        for wrong in (bytes(256), memoryview(bytes(256)).cast("i")):
            with pytest.raises(ConfigError, match="memoryview of bytes"):
                tier.get([name_of(1)], [wrong])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="32 bytes, got 31"):
            tier.put([name_of(1), bytes(31)], [good, other])
        with pytest.raises(ConfigError, match="one for each"):
            tier.put(keys, [good])
        with pytest.raises(RecordError):
            tier.put(keys, [good, new_buffer(len(good))])
        with pytest.raises(RecordError, match="put as"):
            tier.put(keys, [good, good])
        with pytest.raises(RecordError, match="it takes"):
            tier.put(keys, [good, memoryview(bytes(other) + bytes(6))])
        with pytest.raises(ConfigError, match="one for each"):
            tier.get(keys, [new_buffer(1216)])
        for call in (tier.contains, tier.delete):
            with pytest.raises(ConfigError, match="32 bytes, got 33"):
                call([bytes(33)])
        assert tier.contains(keys, timeout_s=10) == [False, False]
        assert tier.stats().outcomes == {}

    # what was changed behind its back

    @pytest.mark.parametrize("payload_bytes", [1000, 200_000])
    @pytest.mark.parametrize("offset", [0, 8, 24, 40, 47, 60, 80, 119, 150, 183, 191, 192, 700, -1])
    def test_one_flipped_bit_is_a_counted_miss_and_the_record_is_dropped(
        self, tier: Tier, offset: int, payload_bytes: int
    ) -> None:
        keys = names_of(range(3))
        records = records_of(keys, payload_bytes)
        tier.put(keys, records, timeout_s=10)
        self.tamper(tier, keys[1], flipped(records[1], offset))
        buffers = buffers_like(records)
        assert tier.get(keys, buffers, timeout_s=10) == [HIT, CORRUPT, HIT]
        assert tier.stats().outcomes["corrupt"] == 1
        assert tier.contains(keys, timeout_s=10) == [True, False, True]
        assert read(tier, keys[1], payload_bytes)[0] is ABSENT
        assert tier.put(keys[1:2], records[1:2], timeout_s=10) == [STORED]
        assert read(tier, keys[1], payload_bytes) == (HIT, records[1])

    def test_the_good_record_of_another_key_is_not_given_for_this_one(self, tier: Tier) -> None:
        keys = names_of(range(2))
        tier.put(keys, records_of(keys), timeout_s=10)
        self.tamper(tier, keys[0], bytes(record_of(keys[1])))
        assert read(tier, keys[0])[0] is CORRUPT
        assert read(tier, keys[1]) == (HIT, record_of(keys[1]))

    def test_a_record_of_a_later_version_is_foreign_and_left_alone(self, tier: Tier) -> None:
        key = name_of(1)
        tier.put([key], [record_of(key)], timeout_s=10)
        self.tamper(tier, key, later_version(record_of(key)))
        assert [read(tier, key)[0], read(tier, key)[0]] == [FOREIGN, FOREIGN]

    @pytest.mark.parametrize("length", [0, 1, 191, 192, 193, 1215, 1217, 5000])
    def test_a_record_of_a_wrong_length_is_a_miss_until_it_is_put_again(
        self, tier: Tier, length: int
    ) -> None:
        key, record = name_of(1), record_of(name_of(1))
        tier.put([key], [record], timeout_s=10)
        self.tamper(tier, key, (bytes(record) + bytes(5000))[:length])
        assert read(tier, key)[0] in (CORRUPT, FOREIGN, ABSENT)
        if tier.put([key], [record], timeout_s=10) == [STORED]:
            assert read(tier, key) == (HIT, record)

    # what it tells

    def test_scan_lists_what_is_there(self, tier: Tier) -> None:
        keys = names_of(range(5))
        records = [record_of(key, 1000 * (1 + i % 2)) for i, key in enumerate(keys)]
        assert self._scan(tier) == []
        tier.put(keys, records, timeout_s=10)
        tier.delete(keys[4:], timeout_s=10)
        listed = {entry.key: entry.num_bytes for entry in self._scan(tier)}
        assert listed == {key: len(record) for key, record in zip(keys[:4], records, strict=False)}

    def test_stats_count_every_outcome_once(self, tier: Tier) -> None:
        keys = names_of(range(5))
        records = records_of(keys)
        tier.put(keys[:3], records[:3], timeout_s=10)
        tier.get(keys, buffers_like(records), timeout_s=10)
        tier.contains(keys, timeout_s=10)
        stats = tier.stats()
        assert stats.outcomes == {"absent": 2, "hit": 3, "stored": 3}
        assert stats.num_records in (3, -1)
        assert stats.num_bytes == -1 or stats.num_bytes >= 3 * len(records[0])
        assert stats.capacity_bytes == -1 or stats.capacity_bytes >= stats.num_bytes
        assert stats.name in repr(tier)

    # time, failure, the end

    def test_a_call_without_time_returns_at_once_and_tells_no_lies(self, tier: Tier) -> None:
        keys = names_of(range(64))
        records = records_of(keys, 10_000)
        began = time.monotonic()
        put = tier.put(keys, records, timeout_s=0.0)
        buffers = buffers_like(records)
        got = tier.get(keys, buffers, timeout_s=0.0)
        tier.contains(keys, timeout_s=0.0)
        assert time.monotonic() - began < 2.0
        assert set(put) <= {STORED, Outcome.TIMEOUT}
        assert set(got) <= {HIT, ABSENT, Outcome.TIMEOUT}
        assert all(buffers[i] == records[i] for i in range(64) if got[i] is HIT)

    def test_a_tier_that_hangs_costs_its_timeout_and_not_more(self, tier: Tier) -> None:
        key, record = name_of(1), record_of(name_of(1))
        tier.put([key], [record], timeout_s=10)
        with self.stalled(tier):
            for call in (
                lambda: tier.get([key], [new_buffer(len(record))], timeout_s=0.2),
                lambda: tier.put([name_of(2)], [record_of(name_of(2))], timeout_s=0.2),
                lambda: tier.contains([key], timeout_s=0.2),
                lambda: tier.delete([name_of(3)], timeout_s=0.2),
            ):
                began = time.monotonic()
                assert call() in ([Outcome.TIMEOUT], [Outcome.ERROR], [False], [True], None)
                assert time.monotonic() - began < 1.2
        deadline = time.monotonic() + 10
        while (found := read(tier, key))[0] is not HIT and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found == (HIT, record)

    def test_a_tier_that_fails_gives_outcomes_and_raises_nothing(self, tier: Tier) -> None:
        keys = names_of(range(2))
        with self.broken(tier):
            missed = {Outcome.ERROR, Outcome.TIMEOUT, ABSENT, FULL, Outcome.SKIPPED}
            assert set(tier.put(keys, records_of(keys))) <= missed
            assert set(tier.get(keys, buffers_like(records_of(keys)))) <= missed
            assert tier.contains(keys) == [False, False]
            tier.delete(keys)

    def test_what_was_flushed_is_there_after_reopening(self, make_tier: MakeTier) -> None:
        keys = names_of(range(6))
        records = [record_of(key, 1000 + 200_000 * (i % 2)) for i, key in enumerate(keys)]
        with make_tier() as tier:
            tier.put(keys, records, timeout_s=10)
            tier.delete(keys[5:], timeout_s=10)
            tier.flush()
            again = self.reopen(tier)
        with again as tier:
            buffers = buffers_like(records)
            assert tier.contains(keys, timeout_s=10) == [True] * 5 + [False]
            assert tier.get(keys, buffers, timeout_s=10) == [HIT] * 5 + [ABSENT]
            assert buffers[:5] == records[:5]
            assert tier.put(keys[5:], records[5:], timeout_s=10) == [STORED]
            tier.check()

    def test_a_tier_closes_twice_and_then_misses(self, make_tier: MakeTier) -> None:
        tier = make_tier()
        key, record = name_of(1), record_of(name_of(1))
        tier.put([key], [record], timeout_s=10)
        tier.close()
        tier.close()
        assert tier.get([key], [new_buffer(len(record))]) == [Outcome.ERROR]
        assert tier.put([key], [record]) == [Outcome.ERROR]
        assert tier.contains([key]) == [False]
        tier.delete([key])
        assert tier.name in repr(tier)

    def _scan(self, tier: Tier) -> list[ListedRecord]:
        try:
            return list(tier.scan())
        except (TierError, NotImplementedError) as error:
            pytest.skip(f"this tier cannot list its records: {error}")
