"""Random lives of managers, their events over a channel that loses, doubles and reorders, and who follows them.

Whenever the follower does not call itself degraded, its mirror finds of every prompt what the manager found of it
when the batches were published that the follower has taken.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire import CacheManager, LayerGroup, Scope, ops
from quire.core import FullAttention
from quire.errors import OutOfBlocks
from quire.exchange import EventLog
from quire.groups import ChunkedAttention, Recurrent, SlidingWindow
from quire.observe import BatchStream, Follower, Mirror
from quire.observe.telling import is_divided, salt_key

SIZE = 2
GROUPS = [
    [("full", FullAttention())],
    [("full", FullAttention()), ("window", SlidingWindow(3, interval=8))],
    [("window", SlidingWindow(4)), ("full", FullAttention()), ("more", FullAttention())],
    [("full", FullAttention()), ("state", Recurrent(interval=4))],
    [("full", FullAttention()), ("chunk", ChunkedAttention(6)), ("state", Recurrent())],
]
SCOPES = [
    None,
    Scope(salt="tenant"),
    Scope(lora="poet"),
    Scope(salt="tenant", lora="poet"),
    Scope(tenant="tenant"),
    Scope(tenant="tenant", salt="session"),
]
TEXT = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=5).map(
    lambda parts: [each * 10 + at for each in parts for at in range(SIZE)]
)


def expected(manager, tokens, scope):
    """The tokens of a hit of whole blocks; `probe` leaves one to compute, and knows heads of blocks as well."""
    return manager.probe([*tokens, 0], scope).num_tokens // SIZE * SIZE


def known(mirror, tokens, scope):
    scope = scope or Scope()
    lora = [scope.lora] if scope.lora else []
    salt = [salt_key(scope)] if is_divided(scope) else []
    extra = [[*lora, *salt], *[lora] * len(tokens)]
    return mirror.lookup(tokens, lora_name=scope.lora, extra_keys=extra)


class Events(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from(GROUPS), blocks=st.integers(6, 14), kept=st.sampled_from([1, 3, 100])
    )
    def begin(self, groups, blocks, kept):
        self.groups, self.blocks, self.kept = groups, blocks, kept
        self.now, self.asked, self.channel = 0.0, [], []
        self.follower = Follower(Mirror())
        self.found, self.num_lives = {0: {}}, 0
        self.start()

    def start(self):
        """A publisher with an empty cache."""
        groups = [LayerGroup(name, self.blocks, kind) for name, kind in self.groups]
        self.manager = CacheManager(groups=groups, block_size=SIZE, watchers=[EventLog()])
        self.num_lives += 1
        self.stream = BatchStream(self.manager, self.kept, self.clock, self.num_lives)
        self.open = []
        self.found[self.stream.next_number] = {}

    def clock(self):
        self.now += 1
        return self.now

    @rule(tokens=TEXT, scope=st.sampled_from(SCOPES), ends=st.booleans(), until=st.integers(0, 10))
    def request(self, tokens, scope, ends, until):
        self.asked.append((tuple(tokens), scope))
        try:
            seq = self.manager.open(tokens, scope)
        except OutOfBlocks:
            return
        try:
            for part in (min(max(until, seq.computed), len(tokens)), len(tokens)):
                if part > seq.computed:
                    self.manager.reserve(seq, part - seq.computed)
                    self.manager.take_copies()
                    self.manager.commit(seq, tokens[seq.computed : part])
                    self.manager.take_copies()
        except OutOfBlocks:
            ends = True
        if ends:
            self.manager.close(seq)
        else:
            self.open.append((seq, list(tokens), scope))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), token=st.sampled_from([10, 20]), ends=st.booleans())
    def decode(self, data, token, ends):
        at = data.draw(st.integers(0, len(self.open) - 1))
        seq, tokens, scope = self.open[at]
        try:
            for each in range(SIZE):
                self.manager.reserve(seq, 1)
                self.manager.take_copies()
                self.manager.commit(seq, [token + each])
                self.manager.take_copies()
                tokens.append(token + each)
        except OutOfBlocks:
            ends = True
        self.asked.append((tuple(tokens), scope))
        if ends:
            self.manager.close(seq)
            del self.open[at]

    @rule(tokens=TEXT, scope=st.sampled_from(SCOPES))
    def invalidate(self, tokens, scope):
        ops.invalidate(self.manager, tokens, scope)

    @rule(count=st.integers(1, 4))
    def reclaim(self, count):
        ops.reclaim(self.manager, count)

    @rule()
    def reset(self):
        self.open.clear()
        self.manager.reset()

    @rule()
    def publish(self):
        self.channel += self.stream.take()
        self.found[self.stream.next_number] = {
            asked: expected(self.manager, *asked) for asked in self.asked
        }

    @rule(count=st.integers(1, 3))
    def deliver(self, count):
        for _ in range(count):
            if self.channel:
                self.follower.receive(self.channel.pop(0))

    @precondition(lambda self: self.channel)
    @rule(data=st.data(), how=st.sampled_from(["lose", "double", "reorder", "garble"]))
    def damage(self, data, how):
        at = data.draw(st.integers(0, len(self.channel) - 1))
        number, payload = self.channel.pop(at)
        if how == "double":
            self.channel[at:at] = [(number, payload)] * 2
        elif how == "reorder":
            to = data.draw(st.integers(0, len(self.channel)))
            self.channel.insert(to, (number, payload))
        elif how == "garble":
            self.channel.insert(at, (number, payload[:-1]))

    @precondition(lambda self: self.follower.wish)
    @rule(is_old=st.booleans())
    def mend(self, is_old):
        """Ask for what is wished; an old engine offers no snapshots."""
        self.publish()
        for wish in (
            ("snapshot", "replay") if self.follower.wish == "snapshot" else ("replay", "snapshot")
        ):
            if self.follower.wish is None:
                return
            if wish == "replay":
                self.follower.refill(self.stream.replay(self.follower.replay_from))
            elif not is_old and (parts := self.stream.snapshot()):
                self.follower.restore(parts[0][0], [payload for _, payload in parts])
        if is_old and self.follower.wish is not None:
            self.follower.skip()

    @rule(data=st.data(), is_noticed=st.booleans())
    def restart(self, data, is_noticed):
        """Restart the publisher: messages in flight arrive after the disconnect is noticed, if at all."""
        if is_noticed:
            self.follower.doubt()
        for message in self.channel:
            if data.draw(st.booleans()):
                self.follower.receive(message)
        self.channel.clear()
        self.start()

    @invariant()
    def what_is_known_is_what_was_cached(self):
        follower = getattr(self, "follower", None)
        if follower is None:
            return
        follower.consumer.check()
        if follower.is_degraded:
            return
        for asked, found in self.found[follower.next_number].items():
            assert known(follower.consumer, *asked) == found, asked


TestEvents = Events.TestCase
TestEvents.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True
)
