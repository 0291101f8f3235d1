"""The smallest tier: records in a dict, oldest first out."""

from quire.errors import TierError
from quire.tiers.base import ListedRecord, Outcome, Tier


class DictTier(Tier):
    """Keeps at most `capacity` records, in the order in which they were last put or touched."""

    in_memory = True

    def __init__(self, name="dict", capacity=1 << 30):
        super().__init__()
        self.name, self.capacity = name, capacity
        self.records = {}
        self.leased = {}
        self.is_closed = False

    def _get(self, keys, buffers, timeout_s, answers):
        self._must_be_open()
        for index, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            record = self.records.get(key)
            if record is None:
                answers.settle(index, Outcome.ABSENT)
            elif len(record) != len(buffer):
                answers.settle(index, Outcome.FOREIGN)
            else:
                buffer[:] = record
                answers.settle(index, Outcome.HIT)
                if answers.claims_drop(index) and self.records.get(key) is record:
                    del self.records[key]

    def _put(self, keys, records, timeout_s, done):
        self._must_be_open()
        for index, (key, record) in enumerate(zip(keys, records, strict=True)):
            if len(self.records.get(key, b"")) == len(record):
                done[index] = Outcome.PRESENT
                continue
            while len(self.records) >= self.capacity:
                self._evict()
            self.records[key] = bytes(record)
            done[index] = Outcome.STORED

    def _evict(self):
        oldest = next(iter(self.records))
        if self.evicting is not None:
            self.evicting([oldest], [memoryview(self.records[oldest])])
        self.records.pop(oldest, None)

    def _contains(self, keys, timeout_s):
        self._must_be_open()
        return [key in self.records for key in keys]

    def close(self):
        self.is_closed = True

    def _must_be_open(self):
        if self.is_closed:
            raise TierError(f"{self.name} is closed")

    def _delete(self, keys, timeout_s):
        for key in keys:
            self.records.pop(key, None)

    def touch(self, keys):
        for key in reversed(keys):
            if key in self.records:
                self.records[key] = self.records.pop(key)

    def lease(self, keys, seconds):
        self.leased.update(dict.fromkeys(keys, seconds))

    def scan(self):
        for age, (key, record) in enumerate(reversed(self.records.items())):
            yield ListedRecord(key, len(record), age)

    def _size(self):
        return len(self.records), sum(map(len, self.records.values())), -1
