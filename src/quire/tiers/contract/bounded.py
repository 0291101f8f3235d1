"""The contract of a tier that makes room by itself: `TierContract`, and the order in which records go."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from quire.tiers.base import Outcome, Tier
from quire.tiers.contract.every import FULL, HIT, PRESENT, STORED, MakeTier, TierContract, read
from quire.tiers.contract.samples import name_of, names_of, record_of, records_of
from quire.tiers.format import record_bytes, verify

PAYLOAD = 60_000
"""Of most records here: with the header and padding 60,224 bytes."""


class BoundedContract(TierContract):
    """Holds for every tier with a capacity: `make_tier(capacity)` takes it in bytes."""

    small = 4 << 20
    """A capacity in which 40 to 80 records of `PAYLOAD` bytes have room."""

    tells_evictions = True
    """Whether `evicting` is told of records that make room."""

    def prompts(self, tier: Tier, count: int, length: int, first: int = 0) -> list[list[bytes]]:
        """Put prompts of so many records each and use each in full; return their keys, head first."""
        prompts = [
            names_of(range(first + start * length, first + (start + 1) * length))
            for start in range(count)
        ]
        for keys in prompts:
            assert tier.put(keys, records_of(keys, PAYLOAD), timeout_s=10) == [STORED] * length
            tier.touch(keys)
            self.bounded(tier)
        return prompts

    def bounded(self, tier: Tier) -> None:
        """Assert that the tier keeps to its capacity and its invariants."""
        stats = tier.stats()
        assert 0 <= stats.num_bytes <= stats.capacity_bytes
        tier.check()

    def found(self, tier: Tier, keys: Sequence[bytes]) -> int:
        """Return the number of leading keys that are there; assert that no other is."""
        there = tier.contains(keys, timeout_s=10)
        assert there == sorted(there, reverse=True), "a tail is there without its head"
        return sum(there)

    def test_it_takes_more_than_it_holds_and_keeps_the_newest(self, make_tier: MakeTier) -> None:
        with make_tier(self.small) as tier:
            prompts = self.prompts(tier, count=60, length=4)
            found = [self.found(tier, keys) for keys in prompts]
            assert found[0] == 0
            assert found[-1] == 4
            assert 30 <= sum(found) <= self.small // record_bytes(PAYLOAD)
            assert read(tier, prompts[-1][0], PAYLOAD) == (
                HIT,
                record_of(prompts[-1][0], PAYLOAD),
            )

    def test_what_was_used_lately_stays_longer(self, make_tier: MakeTier) -> None:
        with make_tier(self.small) as tier:
            kept = self.prompts(tier, count=1, length=6)[0]
            for number in range(20):
                self.prompts(tier, count=1, length=6, first=1000 + number * 6)
                tier.touch(kept)
            assert self.found(tier, kept) == 6

    def test_a_tail_goes_before_its_head(self, make_tier: MakeTier) -> None:
        with make_tier(self.small) as tier:
            prompts = self.prompts(tier, count=3, length=12)
            cut = set[int]()
            for number in range(80):
                self.prompts(tier, count=1, length=1, first=1000 + number)
                cut.update(self.found(tier, keys) for keys in prompts)
            assert cut >= {0, 12}
            assert len(cut) > 2, "prompts go in parts"

    def test_a_trunk_that_prompts_share_stays_as_long_as_the_last_of_them(
        self, make_tier: MakeTier
    ) -> None:
        with make_tier(self.small) as tier:
            trunk = self.prompts(tier, count=1, length=8)[0]
            branches = self.prompts(tier, count=2, length=8, first=100)
            for branch in branches:
                tier.touch([*trunk, *branch])
            for number in range(80):
                self.prompts(tier, count=1, length=1, first=1000 + number)
                for branch in branches:
                    self.found(tier, [*trunk, *branch])
                assert tier.contains(branches[0]) <= tier.contains(branches[1])
            assert self.found(tier, trunk) == 0

    def test_a_call_of_more_than_it_holds_keeps_the_head(self, make_tier: MakeTier) -> None:
        with make_tier(self.small) as tier:
            self.prompts(tier, count=4, length=4, first=5000)
            keys = names_of(range(90))
            outcomes = tier.put(keys, records_of(keys, PAYLOAD), timeout_s=10)
            stored = outcomes.count(STORED)
            assert outcomes == [STORED] * stored + [FULL] * (90 - stored)
            assert 40 <= stored == self.found(tier, keys)
            self.bounded(tier)

    def test_a_record_larger_than_the_capacity_is_refused_and_nothing_goes(
        self, make_tier: MakeTier
    ) -> None:
        with make_tier(self.small) as tier:
            (keys,) = self.prompts(tier, count=1, length=30)
            large = record_of(name_of(999), self.small)
            assert tier.put([name_of(999)], [large], timeout_s=10) == [FULL]
            assert self.found(tier, keys) == 30

    def test_sizes_share_the_capacity_and_take_room_from_each_other(
        self, make_tier: MakeTier
    ) -> None:
        with make_tier(self.small) as tier:
            for payload_bytes in (PAYLOAD, 10_000, 200_000, PAYLOAD):
                start = 10_000_000 + payload_bytes
                count = self.small // payload_bytes
                for number in range(start, start + count, 2):
                    keys = names_of([number, number + 1])
                    outcomes = tier.put(keys, records_of(keys, payload_bytes), timeout_s=10)
                    assert set(outcomes) <= {STORED, PRESENT}
                    self.bounded(tier)
                last = names_of(range(start, start + count))
                held = sum(tier.contains(last, timeout_s=10)) * record_bytes(payload_bytes)
                assert held >= self.small // 2, "what is written now gets most of the room"

    def test_room_of_deleted_records_is_used_again(self, make_tier: MakeTier) -> None:
        with make_tier(self.small) as tier:
            told: list[bytes] = []
            tier.evicting = lambda keys, _: told.extend(keys)
            for start in range(0, 400, 40):
                (keys,) = self.prompts(tier, count=1, length=40, first=start)
                assert self.found(tier, keys) == 40
                tier.delete(keys, timeout_s=10)
            assert told == []

    @pytest.mark.parametrize("below", [256, 128])
    def test_what_is_of_use_is_told_of_what_makes_room_with_its_bytes(
        self, make_tier: MakeTier, below: int
    ) -> None:
        """Of use are keys whose first byte is below so much: all, or half of them."""
        if not self.tells_evictions:
            pytest.skip("others write to this tier as well: nothing is told")
        told: dict[bytes, bytes] = {}
        asked: list[bytes] = []

        def evicting(keys: list[bytes], records: list[memoryview]) -> None:
            for key, record in zip(keys, records, strict=True):
                assert verify(record).key == key
                told[key] = bytes(record)

        def evicting_of(keys: list[bytes]) -> list[int]:
            asked.extend(keys)
            return [index for index, key in enumerate(keys) if key[0] < below]

        with make_tier(self.small) as tier:
            tier.evicting, tier.evicting_of = evicting, evicting_of
            keys = [key for prompt in self.prompts(tier, count=50, length=3) for key in prompt]
            there = tier.contains(keys, timeout_s=10)
            gone = [key for key, is_there in zip(keys, there, strict=True) if not is_there]
            of_use = {key for key in gone if key[0] < below}
            assert of_use <= set(told) <= (of_use if asked else set(gone))  # it need not ask
            assert all(told[key] == record_of(key, PAYLOAD) for key in told)

    @pytest.mark.parametrize(("lease_s", "num_kept"), [(60.0, 6), (0.02, 0)])
    def test_a_leased_record_stays_until_its_lease_is_over(
        self, make_tier: MakeTier, lease_s: float, num_kept: int
    ) -> None:
        with make_tier(self.small) as tier:
            if not tier.in_memory:
                pytest.skip("leases are asked of tiers in memory")
            (kept,) = self.prompts(tier, count=1, length=6)
            tier.lease(kept, lease_s)
            time.sleep(0.03)
            self.prompts(tier, count=40, length=4, first=1000)
            assert self.found(tier, kept) == num_kept

    def test_where_all_is_leased_nothing_is_taken_and_nothing_goes(
        self, make_tier: MakeTier
    ) -> None:
        with make_tier(self.small) as tier:
            if not tier.in_memory:
                pytest.skip("leases are asked of tiers in memory")
            keys = names_of(range(90))
            outcomes = tier.put(keys, records_of(keys, PAYLOAD), timeout_s=10)
            held = keys[: outcomes.count(STORED)]
            tier.lease(held, 60.0)
            more = record_of(name_of(999), PAYLOAD)
            assert tier.put([name_of(999)], [more], timeout_s=10) == [Outcome.FULL]
            assert self.found(tier, held) == len(held)
