"""The contract of a tier under a stack with a tier key: records of others are never accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import sha256

import pytest

from quire.errors import RecordError
from quire.tiers.base import Outcome, Tier
from quire.tiers.contract.samples import names_of, record_of
from quire.tiers.format import read_header, seal
from quire.tiers.keys import TierKey
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack

OWN, STRANGER = (TierKey(sha256(each).digest()) for each in (b"own", b"stranger"))

ROUNDS = 5
"""So often all is put again: a tier of a server that removes late may have a bad record for a moment."""


def signed_of(key: bytes, signer: TierKey, payload_bytes: int = 1000) -> memoryview:
    """Return `record_of` a key, signed."""
    record = record_of(key, payload_bytes)
    seal(record, read_header(record), signer)
    return record


class PoisonedContract:
    """Holds for every tier of a `TierStack` with a key."""

    tamper: Callable[[Tier, bytes, bytes], None]

    def poison(self, tier: Tier, key: bytes, record: bytes) -> None:
        """Have a good record of somebody else's found under a key, as far as checksums and indexes tell."""
        self.tamper(tier, key, record)

    def test_a_stack_with_a_tier_key_accepts_nothing_that_it_did_not_sign(
        self, make_tier: Callable[[], Tier]
    ) -> None:
        """A third is signed with the key, for another name; a third by a stranger; a third is not signed."""
        keys = names_of(range(60))
        records = [signed_of(key, OWN) for key in keys]
        tier = make_tier()
        settings = StackSettings(
            key=OWN,
            gate=False,
            queue_bytes="1GiB",
            load_timeout_s=60.0,
            lookup_timeout_s=10.0,
            cool_down_s=0.001,
        )
        with TierStack([tier], settings) as stack:
            until = time.monotonic() + 10
            while (
                stack.stats().tiers[0].reading != "closed"
            ):  # one that could not be opened at first
                assert time.monotonic() < until
                time.sleep(0.002)
                stack.find(keys[:1])
            stack.store(keys, list(map(_copied, records)))
            assert stack.drain(60)
            for at in range(0, len(keys), 2):
                key = keys[at]
                poisons = records[at + 1], signed_of(key, STRANGER), record_of(key)
                poison = poisons[at // 2 % 3]
                if tier.in_memory:
                    with pytest.raises(RecordError):
                        tier.put([key], [poison])
                    tier.delete([key])
                else:
                    self.poison(tier, key, bytes(poison))
            assert -1 not in stack.find(keys[1::2], contiguous=False)
            assert accepted(stack, keys, records) == set(keys[1::2])
            for _ in range(ROUNDS):
                stack.store(keys, list(map(_copied, records)))
                assert stack.drain(60)
                if accepted(stack, keys, records) == set(keys):
                    return
            raise AssertionError(f"not all is found that was put again {ROUNDS} times")


def accepted(stack: TierStack, keys: Sequence[bytes], records: Sequence[memoryview]) -> set[bytes]:
    """Return the keys that a stack gives records of; assert that these are its own."""
    outcomes, buffers = stack.load(keys, list(map(len, records)))
    for at, (outcome, buffer) in enumerate(zip(outcomes, buffers, strict=True)):
        assert buffer == (records[at] if outcome is Outcome.HIT else None), outcome
    return {key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.HIT}


def _copied(record: memoryview) -> memoryview:
    return memoryview(bytearray(record))
