"""The host tier beside a dict: any order of calls, sizes, leases and evictions."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import name_of, names_of, record_of
from quire.tiers.format import new_buffer, record_bytes
from quire.tiers.host import Host
from turns import lived

CAPACITY = 200_000
SIZES = (1000, 3000, 20_000)
NUMBERS = st.integers(0, 79)
PROMPTS = st.lists(NUMBERS, min_size=1, max_size=12, unique=True)
WHOLE = {number: SIZES[number % 3] for number in range(80)}


class HostBesideADict(RuleBasedStateMachine):
    """`held`: payload size by number, used last first in `order`; `leases`: until when."""

    @initialize()
    def open(self):
        self.now = 0.0
        self.held, self.order, self.leases, self.call = {}, [], {}, frozenset()
        self.largest = 0
        self.tier = Host(CAPACITY, clock=lambda: self.now)
        self.tier.evicting = self.evicted
        self.number_of = {name_of(number): number for number in range(80)}

    def teardown(self):
        self.tier.close()

    def evicted(self, keys, records):
        gone = [self.number_of[key] for key in keys]
        for number, record in zip(gone, records, strict=True):
            size = self.held.pop(number)
            assert record == record_of(name_of(number), size)
            assert self.leases.pop(number, 0.0) <= self.now, "a leased record went"
            # Where chunks are cut anew for a larger record, all goes before the call begins.
            is_cut_anew = self.largest > self.tier._arena.chunk_bytes
            assert is_cut_anew or number not in self.call, "a record went for one of its own call"
            older = self.order[self.order.index(number) + 1 :]
            assert not [
                each
                for each in older
                if self.held.get(each) == size
                and each not in gone
                and each not in self.call
                and self.leases.get(each, 0.0) <= self.now
            ], "a record of its size went that was used later than one that stays"
        self.order = [number for number in self.order if number in self.held]

    def used(self, numbers):
        first = [number for number in numbers if number in self.held]
        self.order = first + [number for number in self.order if number not in first]

    def put(self, numbers, sizes):
        keys = names_of(numbers)
        records = [record_of(key, size) for key, size in zip(keys, sizes, strict=True)]
        before = dict(self.held)
        self.call, self.largest = frozenset(numbers), max(map(record_bytes, sizes))
        outcomes = self.tier.put(keys, records)
        self.call = frozenset()
        leased = any(until > self.now for until in self.leases.values())
        # What a call replaces by another size stays until then, and may hold the last chunk.
        replaces = any(before.get(n, size) != size for n, size in zip(numbers, sizes, strict=True))
        for number, size, outcome in zip(numbers, sizes, outcomes, strict=True):
            if self.held.get(number) == size == before.get(number):
                assert outcome is Outcome.PRESENT
            elif outcome is Outcome.STORED:
                self.held[number] = size
                self.leases.pop(number, None)
            else:
                assert outcome is Outcome.FULL
                assert leased or replaces or sum(map(record_bytes, sizes)) > CAPACITY // 4
        self.used(numbers)

    @rule(numbers=PROMPTS)
    def put_a_prompt(self, numbers):
        self.put(numbers, [WHOLE[number] for number in numbers])

    @rule(number=NUMBERS, size=st.sampled_from([*SIZES, 60_000]))
    def put_another_size(self, number, size):
        self.put([number], [size])

    @rule(number=NUMBERS)
    def put_too_much(self, number):
        if self.held.get(number) != CAPACITY:
            key = name_of(number)
            assert self.tier.put([key], [record_of(key, CAPACITY)]) == [Outcome.FULL]
            self.used([number])

    @rule(numbers=PROMPTS)
    def get(self, numbers):
        keys = names_of(numbers)
        buffers = [new_buffer(record_bytes(self.held.get(n, 1000))) for n in numbers]
        for number, buffer, outcome in zip(
            numbers, buffers, self.tier.get(keys, buffers), strict=True
        ):
            if number in self.held:
                assert outcome is Outcome.HIT
                assert buffer == record_of(name_of(number), self.held[number])
            else:
                assert outcome is Outcome.ABSENT

    @rule(numbers=PROMPTS)
    def touch(self, numbers):
        self.tier.touch(names_of(numbers))
        self.used(numbers)

    @rule(numbers=PROMPTS)
    def delete(self, numbers):
        self.tier.delete(names_of(numbers))
        for number in numbers:
            self.held.pop(number, None)
            self.leases.pop(number, None)
        self.order = [number for number in self.order if number in self.held]

    @rule(numbers=st.lists(NUMBERS, max_size=4, unique=True), seconds=st.sampled_from([0.5, 5.0]))
    def lease(self, numbers, seconds):
        self.tier.lease(names_of(numbers), seconds)
        for number in numbers:
            if number in self.held:
                self.leases[number] = max(self.leases.get(number, 0.0), self.now + seconds)

    @precondition(lambda self: self.leases)
    @rule(seconds=st.sampled_from([0.3, 1.0, 10.0]))
    def wait(self, seconds):
        self.now += seconds

    @invariant()
    def holds_what_the_dict_holds(self):
        self.tier.check()
        there = self.tier.contains(names_of(range(80)))
        assert [number for number in range(80) if there[number]] == sorted(self.held)
        stats = self.tier.stats()
        assert stats.num_records == len(self.held)
        assert stats.num_bytes == sum(map(record_bytes, self.held.values())) <= CAPACITY
        assert [entry.key for entry in self.tier.scan()] == names_of(self.order)


TestHostBesideADict, TestHostBesideADictLong = lived(
    HostBesideADict, 30, 600, stateful_step_count=40
)
