"""Requirements of every tier that several threads use at once; a part of `TierContract`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
import pytest

from quire.errors import TierError
from quire.tiers.base import Outcome, Tier
from quire.tiers.contract.samples import buffers_like, flipped, name_of, names_of, record_of
from quire.tiers.format import new_buffer, record_bytes

_KEPT = (Outcome.STORED, Outcome.PRESENT)


class ThreadsContract:
    """Holds for every tier, whatever other threads do."""

    drops_what_it_read: bool = True
    """Whether a damaged record is dropped, and nothing that was put in its place since; False: its key is deleted."""
    tells_what_is_there: bool = True
    """Whether a record is there when a `put` says so; False: where another thread writes it just then, it comes a moment later."""

    def tamper(self, tier: Tier, key: bytes, record: bytes) -> None:
        """Put these bytes, of any length, where the tier keeps the record of `key`, behind its back."""
        pytest.skip(f"{tier.name}: no way to change the {len(record)} bytes of {key.hex()[:8]}")

    def test_threads_share_a_tier_and_no_hit_is_wrong(self, tier: Tier) -> None:
        keys = names_of(range(24))
        expected = {key: record_of(key, 20_000) for key in keys}
        wrong: list[object] = []

        def work(seed: int) -> None:
            numbers = np.random.default_rng(seed)
            for _ in range(12):
                some = [keys[int(i)] for i in numbers.choice(len(keys), 4, replace=False)]
                records = [expected[key] for key in some]
                put = tier.put(some, records, timeout_s=10)
                wrong.extend(each for each in put if each not in _KEPT)
                buffers = buffers_like(records)
                got = tier.get(some, buffers, timeout_s=10)
                wrong.extend(o for o in got if o not in (Outcome.HIT, Outcome.ABSENT))
                pairs = zip(some, got, buffers, strict=True)
                wrong.extend(key for key, o, b in pairs if o is Outcome.HIT and b != expected[key])
                tier.touch(some)
                tier.delete(some[:1], timeout_s=10)

        run_in_threads(*(partial(work, seed) for seed in range(4)))
        assert wrong == []
        tier.check()

    def test_what_one_thread_puts_and_deletes_is_what_it_finds_whatever_others_do(
        self, tier: Tier
    ) -> None:
        """It alone changes these keys; others read, use and list them, and have keys of their own."""
        sizes = (100, 1000, 20_000)
        is_over = threading.Event()

        def own(first: int) -> None:
            rng = np.random.default_rng(first)
            keys = names_of(range(first, first + 6))
            held: dict[bytes, int] = {}
            for _ in range(8):
                some = [keys[int(i)] for i in rng.choice(len(keys), 3, replace=False)]
                if rng.random() < 0.3:
                    tier.delete(some, timeout_s=10)
                    for key in some:
                        held.pop(key, None)
                else:
                    payloads = {key: int(rng.choice(sizes)) for key in some}
                    records = [record_of(key, payload) for key, payload in payloads.items()]
                    outcomes = tier.put(some, records, timeout_s=10)
                    assert outcomes == [
                        Outcome.PRESENT if held.get(key) == payload else Outcome.STORED
                        for key, payload in payloads.items()
                    ]
                    held |= payloads
                asked = [held.get(key, 1000) for key in keys]
                asked[0] = int(rng.choice(sizes))
                buffers = [new_buffer(record_bytes(payload)) for payload in asked]
                found = tier.get(keys, buffers, timeout_s=10)
                assert found == [
                    _expected(held.get(key), payload)
                    for key, payload in zip(keys, asked, strict=True)
                ]
                for key, payload, outcome, buffer in zip(keys, asked, found, buffers, strict=True):
                    assert outcome is not Outcome.HIT or buffer == record_of(key, payload)
                assert tier.contains(keys, timeout_s=10) == [key in held for key in keys]

        def read() -> None:
            keys = names_of(range(12))
            while not is_over.wait(0.01):
                buffers = [new_buffer(record_bytes(1000)) for _ in keys]
                for key, outcome, buffer in zip(
                    keys, tier.get(keys, buffers, timeout_s=10), buffers, strict=True
                ):
                    assert outcome is not Outcome.HIT or buffer == record_of(key, 1000)
                tier.touch(keys)
                tier.lease(keys, 0.001)
                tier.flush()
                tier.check()
                tier.stats()
                with suppress(TierError, NotImplementedError):
                    list(tier.scan())

        with switching_often():
            reading = threading.Thread(target=read)
            reading.start()
            try:
                run_in_threads(partial(own, 0), partial(own, 6))
            finally:
                is_over.set()
                reading.join(60)
        tier.check()

    def test_who_is_told_that_a_record_is_there_finds_it(self, tier: Tier) -> None:
        """Of several that put a record at once, one stores it, and the others are not told before."""
        if not self.tells_what_is_there:
            pytest.skip(
                f"{tier.name} does not know whether another thread has written all of a record"
            )
        for number in range(4):
            key = name_of(number)
            record = record_of(key, 1 << 20)
            both = threading.Barrier(2)

            def put(
                key: bytes = key, record: memoryview = record, both: threading.Barrier = both
            ) -> None:
                both.wait(10)
                (outcome,) = tier.put([key], [record], timeout_s=10)
                assert outcome in _KEPT
                buffer = new_buffer(len(record))
                assert tier.get([key], [buffer], timeout_s=10) == [Outcome.HIT]
                assert buffer == record

            with switching_often():
                run_in_threads(put, put)

    def test_a_damaged_record_that_was_replaced_while_it_was_read_is_not_dropped_again(
        self, tier: Tier
    ) -> None:
        if not self.drops_what_it_read:
            pytest.skip(f"{tier.name} cannot tell what it read from what was put since")
        keys = names_of(range(3))
        records = [record_of(key) for key in keys]
        tier.put(keys, records, timeout_s=10)
        self.tamper(tier, keys[0], flipped(records[0], 700))
        came: list[None] = []

        def replace() -> None:
            came.append(None)
            if len(came) == len(keys):  # the others have their outcomes
                tier.delete(keys[:1], timeout_s=10)
                assert tier.put(keys[:1], records[:1], timeout_s=10) == [Outcome.STORED]

        found = tier.get(keys, buffers_like(records), timeout_s=10, came=replace)
        assert found == [Outcome.CORRUPT, Outcome.HIT, Outcome.HIT]
        assert tier.get(keys, buffers_like(records), timeout_s=10) == [Outcome.HIT] * 3


def run_in_threads(*works: Callable[[], None]) -> None:
    """Run works at once, each in a thread, and raise what one of them raised."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread of the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a call did not return within a minute"
    for error in errors:
        raise error


@contextmanager
def switching_often() -> Generator[None]:
    """While entered, threads take turns after a few bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _expected(held: int | None, payload: int) -> Outcome:
    """Return what reading a record of so many payload bytes gives, where one of `held` is there."""
    if held is None:
        return Outcome.ABSENT
    return Outcome.HIT if held == payload else Outcome.FOREIGN
