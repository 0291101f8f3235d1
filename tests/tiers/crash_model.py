"""Possible contents of a disk tier's directory after its writers died, for `benchmarks/crash_disk.py`."""


class Expected:
    """The possible results for each key: None, or (payload bytes, generation).

    `now`      after what was told
    `lasting`  after a loss of power: all that may have been since the last flush began
    `were_put`  ever: such a record may be back after a loss of power
    """

    def __init__(self, names):
        self.now = {name: {None} for name in names}
        self.lasting = {name: {None} for name in names}
        self.were_put = {name: set() for name in names}
        self._flushing = None
        self._evicted = set()
        self._capacity = 0
        self._is_alone = True
        self._lost_power = False

    def hear(self, kind, *details):
        getattr(self, f"_{kind}")(*details)

    def ended(self, *, lost_power):
        """Take note of the end of a writer."""
        self._flushing = None
        self._evicted.clear()
        if lost_power:
            self.now = {name: set(states) for name, states in self.lasting.items()}
            self._lost_power = True

    def check(self, found):
        """Compare with what was found: name, payload bytes and generation, or None where it was corrupt."""
        found = {name: state and tuple(state) for name, state in found}
        for name, allowed in self.now.items():
            state = found.get(name)
            may_be_back = self._lost_power and None in allowed
            assert state in allowed or (may_be_back and state in self.were_put[name]), (
                f"{name} is {state}, not one of {allowed}"
            )
            assert state or name not in found or self._lost_power, f"{name} is corrupt"
            self._be(name, {state})

    def _be(self, name, states):
        self.now[name] = states
        for each in (self.lasting, self._flushing):
            if each is not None:
                each[name] |= states

    def _opens(self, capacity, is_alone):
        if capacity < self._capacity:
            for name, states in self.now.items():
                self._be(name, states | {None})
        self._capacity, self._is_alone = capacity, is_alone
        self._evicted.clear()

    def _found(self, found):
        self.check(found)
        self._lost_power = False

    def _closed(self):
        """Nothing changes by that."""

    def _dies(self, _):
        """Nothing changes by that."""

    def _evicts(self, names):
        self._evicted.update(names)
        for name in names:
            self._be(name, self.now[name] | {None})

    def _puts(self, names, payloads, generation):
        self._evicted.difference_update(names)
        for name, payload in zip(names, payloads, strict=True):
            others = any(state and state[0] != payload for state in self.now[name])
            made_room = {None} if others else set()  # as it may do for a record of another size
            self.were_put[name].add((payload, generation))
            self._be(name, self.now[name] | {(payload, generation)} | made_room)

    def _put(self, names, payloads, generation, outcomes):
        if self._is_alone:  # nobody else may have used meanwhile what was to go
            for name in self._evicted:
                self._be(name, {None})
            self._evicted.clear()
        for name, payload, outcome in zip(names, payloads, outcomes, strict=True):
            state = (payload, generation)
            if outcome == "stored":
                self._be(name, {state} | ({None} if name in self._evicted else set()))
            else:
                self._be(name, self.now[name] - {state})

    def _deletes(self, names):
        for name in names:
            self._be(name, self.now[name] | {None})

    def _deleted(self, names):
        for name in names:
            self._be(name, {None})

    def _flushes(self):
        self._flushing = {name: set(states) for name, states in self.now.items()}

    def _flushed(self):
        self.lasting, self._flushing = self._flushing, None
