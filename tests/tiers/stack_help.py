"""Stacks of tiers that count their calls, in virtual time."""

from dict_tier import DictTier
from simulated_lanes import SimulatedLanes

from quire.tiers.contract.samples import names_of, records_of
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack

KEYS = names_of(range(1000))
RECORDS = records_of(KEYS, 100)
SIZE = len(RECORDS[0])


class Counted(DictTier):
    """Takes `delays_s` of the next calls, and remembers which keys it was asked for, by method."""

    def __init__(self, lanes, name="disk", capacity=1 << 30, *, in_memory=False, is_local=True):
        super().__init__(name, capacity)
        self.in_memory, self.is_local = in_memory, is_local
        self.lanes = lanes
        self.calls = []
        self.get_s = self.put_s = self.contains_s = 0.0

    def asked(self, method):
        return [keys for name, keys in self.calls if name == method]

    def _get(self, keys, buffers, timeout_s, answers):
        self._call("get", keys, self.get_s)
        super()._get(keys, buffers, timeout_s, answers)

    def _put(self, keys, records, timeout_s, done):
        self._call("put", keys, self.put_s)
        super()._put(keys, records, timeout_s, done)

    def _contains(self, keys, timeout_s):
        self._call("contains", keys, self.contains_s)
        return super()._contains(keys, timeout_s)

    def _call(self, name, keys, seconds):
        self.calls.append((name, list(keys)))
        if seconds:
            self.lanes.sleep(seconds)


class Stacked:
    """A stack of `Counted` tiers: "host" is in memory, "remote" is others' as well."""

    def __init__(self, *names, capacity=1 << 30, **settings):
        self.lanes = SimulatedLanes(1, switching=0.0)
        self.tiers = [
            Counted(
                self.lanes,
                name,
                capacity if name == "host" else 1 << 30,
                in_memory=name == "host",
                is_local=name != "remote",
            )
            for name in names
        ]
        self.stack = TierStack(self.tiers, StackSettings(**settings), lanes=self.lanes)

    def run(self, scenario):
        """Run `scenario(stack, *tiers)`, check the stack and close it."""

        def main():
            answer = scenario(self.stack, *self.tiers)
            self.stack.check()
            self.stack.close()
            return answer

        return self.lanes.run(main)

    def timed(self, call):
        began_s = self.lanes.time_s
        answer = call()
        return answer, round(self.lanes.time_s - began_s, 6)

    def beside(self, call):
        """Run a call beside; return what holds its answer and time, once it is there."""
        held = []
        self.lanes.spawn_client("beside", lambda: held.append(self.timed(call)))
        return held


def put(tier, numbers):
    keys, records = [KEYS[i] for i in numbers], [RECORDS[i] for i in numbers]
    DictTier._put(tier, keys, records, 1.0, [None] * len(keys))


def load(stack, numbers, timeout_s=None, found=None):
    """Load keys, and return outcomes in words; hits are the right records."""
    keys, sizes = [KEYS[i] for i in numbers], [len(RECORDS[i]) for i in numbers]
    outcomes, buffers = stack.load(keys, sizes, timeout_s, found=found)
    for i, outcome, buffer in zip(numbers, outcomes, buffers, strict=True):
        assert buffer == (RECORDS[i] if outcome == "hit" else None)
    return [outcome.value for outcome in outcomes]


def wanted(stack, keys):
    return [bool(tiers) for tiers in stack.wanted(keys)]


def store(stack, numbers):
    outcomes = stack.store([KEYS[i] for i in numbers], [RECORDS[i] for i in numbers])
    return [outcome.value for outcome in outcomes]
