"""A stack of faulty tiers in virtual time, and clients that use it: one seed, one history."""

from random import Random

from dict_tier import DictTier
from simulated_lanes import SimulatedLanes

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import name_of, record_of
from quire.tiers.faults import FaultPlan, Faulty
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack

PAYLOADS = (40, 100, 300)
NUM_PROMPTS = 6
NUM_KEYS = 8
SLACK_S = 1e-6

RECORDS = {}
for _prompt in range(NUM_PROMPTS):
    for _place in range(NUM_KEYS):
        _key = name_of(1000 * _prompt + _place)
        RECORDS[_key] = bytes(record_of(_key, PAYLOADS[_place % 3]))


def prompt(number):
    return [name_of(1000 * number + place) for place in range(NUM_KEYS)]


def sizes(keys):
    return [len(RECORDS[key]) for key in keys]


def fresh(keys):
    return [memoryview(bytearray(RECORDS[key])) for key in keys]


def all_faults(random):
    """A plan with some of all faults, at chances that are drawn too."""
    return FaultPlan(
        latency_s=random.choice([0.0, 0.001, 0.02, 0.5]),
        bandwidth=random.choice([0.0, 1e5]),
        errors=random.choice([0.0, 0.0, 0.0, 0.1, 1.0]),
        hangs=random.choice([0.0, 0.0, 0.05, 0.3]),
        hang_s=random.choice([0.5, 5.0, 50.0]),
        losses=random.choice([0.0, 0.2]),
        full=random.choice([0.0, 0.2]),
        corruption=random.choice([0.0, 0.2]),
        short_reads=random.choice([0.0, 0.2]),
        false_hits=random.choice([0.0, 0.2]),
        crash_at=random.choice([0, 0, 0, 10]),
    )


def all_settings(random):
    return StackSettings(
        write=random.choice(["through", "back", "second_use"]),
        promote=random.random() < 0.8,
        gate=random.random() < 0.8,
        lookup_timeout_s=0.1,
        load_timeout_s=1.0,
        queue_bytes=random.choice([1000, 4000, 1 << 20]),
        batch_bytes=random.choice([300, 2000, 1 << 20]),
        threads=random.choice([1, 2]),
        failures=random.choice([1, 3]),
        cool_down_s=0.06,
    )


class FaultyStack:
    """A stack of a small tier in memory and two faulty ones, and what was asked of it.

    `history` is all that callers saw, with virtual times. `jumping` is the chance that a step of a
    client sets the clock.
    """

    def __init__(self, seed, jumping=0.0):
        self.random = Random(seed)
        self.lanes = SimulatedLanes(
            seed, switching=self.random.choice([0.02, 0.3]), stall_s=self.random.choice([0.0, 0.3])
        )
        self.num_prompts = self.random.choice([1, 2, NUM_PROMPTS])
        self.history = []
        self.jumping = jumping
        plans = [all_faults(self.random) for _ in range(2)]
        self.faulty = [
            Faulty(self._tier(index), plan, 10 * seed + index, sleep=self.lanes.sleep)
            for index, plan in enumerate(plans)
        ]
        tiers = list(self.faulty)
        if self.random.random() < 0.4:
            tiers.insert(0, DictTier("host", capacity=12))
        elif self.random.random() < 0.3:
            tiers.append(DictTier("host", capacity=12))
        self.settings = all_settings(self.random)
        self.stack = TierStack(tiers, self.settings, lanes=self.lanes)
        copied = self.stack._reader._copied

        def slowly(size, record):
            if self.lanes.current.may_stall:
                self.lanes.sleep(self.random.choice([0.0, 0.02]))
            return copied(size, record)

        self.stack._reader._copied = slowly

    def _tier(self, index):
        tier = DictTier(("disk", "remote")[index], capacity=30)
        tier.is_local = index == 0
        for number in range(self.num_prompts):
            keys = prompt(number)[: self.random.randrange(NUM_KEYS + 1)]
            tier.put(keys, fresh(keys))
        return tier

    def note(self, *what):
        self.history.append((round(self.lanes.time_s, 9), *what))

    def timed(self, name, limit_s, call):
        began_s = self.lanes.time_s
        answer = call()
        took_s = self.lanes.time_s - began_s
        assert took_s <= limit_s + SLACK_S, (name, took_s, limit_s)
        return answer

    # What clients do

    def step(self, random):
        stack = self.stack
        if random.random() < self.jumping:
            self.lanes.jump(random.choice([0.05, 3.0, 1e6]))
        keys = prompt(random.randrange(self.num_prompts))[: random.randrange(1, NUM_KEYS + 1)]
        action = random.choice(["store", "evict", "read", "read", "read", "read", "prefetch", "go"])
        if action == "store":
            self.timed("count_use", 0, lambda: stack.count_use(keys))
            wanted = self.timed("wanted", 0, lambda: stack.wanted(keys))
            chosen = [key for key, is_wanted in zip(keys, wanted, strict=True) if is_wanted]
            tiers = random.choice([None, wanted[wanted > 0]])
            outcomes = self.timed("store", 0, lambda: stack.store(chosen, fresh(chosen), tiers))
            self.note("stored", [each.value for each in outcomes])
        elif action == "evict":
            outcomes = self.timed(
                "store_evicted", 0, lambda: stack.store_evicted(keys, fresh(keys))
            )
            self.note("store_evicted", [each.value for each in outcomes])
        elif action == "prefetch":
            began = self.timed("prefetch", 0, lambda: stack.prefetch(keys, sizes(keys)))
            self.lanes.sleep(random.choice([0.0, 0.1]))
            if random.random() < 0.8:
                wait_s = random.choice([0.0, 0.3, 3.0])
                ready = self.timed("finish", wait_s, lambda: began.finish(wait_s))
                self.note("prefetched", ready)
        elif action == "read":
            self.read(keys, random)
        else:
            self.lanes.sleep(random.choice([0.001, 0.1, 2.0]))

    def read(self, keys, random):
        settings, stack = self.settings, self.stack
        found = self.timed("find", settings.lookup_timeout_s, lambda: stack.find(keys))
        num_keys = self.timed(
            "choose",
            0,
            lambda: stack.choose(
                keys, found, sizes(keys), lambda count: 0.01 * (len(keys) - count)
            ),
        )
        if random.random() < 0.7:
            keys, found = keys[:num_keys], found[:num_keys]
        timeout_s = random.choice([None, None, 0.01, 0.1, 0.15, 0.2, 0.3])
        hint = found if random.random() < 0.5 else None
        outcomes, buffers = self.timed(
            "load",
            settings.load_timeout_s if timeout_s is None else timeout_s,
            lambda: stack.load(keys, sizes(keys), timeout_s, found=hint),
        )
        self.note("loaded", found, [each.value for each in outcomes])
        # Marked as the caller's: whoever writes there later is seen.
        for key, outcome, buffer in zip(keys, outcomes, buffers, strict=True):
            assert (outcome is Outcome.HIT) == (buffer is not None)
            if buffer is not None:
                assert bytes(buffer) == RECORDS[key], "wrong bytes"
                buffer[:] = b"!" * len(buffer)
        self.lanes.sleep(random.choice([0.0, 0.05, 1.0]))
        for buffer in filter(None, buffers):
            assert bytes(buffer) == b"!" * len(buffer), "written after it was given back"
        stack.give_back(buffers)

    def client(self, number, num_steps, done):
        random = Random(1000 * number + self.random.randrange(1000))

        def work():
            for _ in range(num_steps):
                self.step(random)
            done.append(number)

        return work

    def together(self, num_clients, num_steps):
        """Run clients side by side until all are done."""
        done = []
        for number in range(num_clients):
            self.lanes.spawn_client(f"client {number}", self.client(number, num_steps, done))
        while len(done) < num_clients:
            self.lanes.sleep(0.5)

    def heal(self):
        self.lanes.stall_s = 0.0
        for tier in self.faulty:
            tier.plan = FaultPlan(latency_s=0.001)
            tier.revive()
