"""`TierStack`: several tiers as one, fastest first; the interface of engines to tiers."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Self

import numpy as np

from quire.errors import ConfigError, InvariantError
from quire.tiers.base import Buffers, Keys, Outcome, Tier, check_keys
from quire.tiers.stack.background_writer import BackgroundWriter
from quire.tiers.stack.fetching import Fetch, check_sizes
from quire.tiers.stack.gate import CostGate
from quire.tiers.stack.lanes import Deadline, Lanes, Work, close_at_exit
from quire.tiers.stack.lookup import TierLookup, patience_s
from quire.tiers.stack.member import Shared, StackMember, tier_names
from quire.tiers.stack.placement import Bits, Placer
from quire.tiers.stack.prefetch import Prefetch, Prefetching
from quire.tiers.stack.purging import PurgeableStack
from quire.tiers.stack.reading import Reader
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stats import StackStats, counted
from quire.tiers.stack.vouching import vouch
from quire.tiers.stack.writing import STORE_TIMEOUT_S, check_own
from quire.tiers.threads import Signal

MOST_TIERS = 8
_log = logging.getLogger(__name__)


class TierStack(PurgeableStack):
    """Tiers as one, fastest first. It owns them and closes them, at process exit at the latest.

    Keys are flat lists, a prompt's head first, the parts of one block side by side.
    No call raises because a tier fails, and no call waits longer than its deadline.

    A tier `in_memory` is called on the caller's thread. Every other one has lanes of its own, so that one that
    hangs holds up nobody but those who ask for what only it has, and them until their deadlines.

    Held at every moment: what waits for a tier takes at most its `queue_bytes`; each tier has at most
    `threads` + 1 threads, and prefetches have a few; a record that `load` returns is written by nobody any more.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        settings: StackSettings | None = None,
        *,
        lanes: Lanes | None = None,
    ) -> None:
        if isinstance(tiers, (str, Mapping)) or not (
            isinstance(tiers, Sequence) and all(isinstance(each, Tier) for each in tiers)  # pyright: ignore[reportUnnecessaryIsInstance]
        ):
            raise ConfigError(
                f"a TierStack is made of open tiers, fastest first, got {tiers!r:.80}; `open_tier` opens lines and tables"
            )
        if not 1 <= len(tiers) <= MOST_TIERS:
            raise ConfigError(f"a stack has 1 to {MOST_TIERS} tiers, got {len(tiers)}")
        self.tiers = tuple(tiers)
        self.settings = settings or StackSettings()
        self.names = tier_names(tiers, self.settings)
        vouch(tiers, self.settings.key)
        shared = self._shared = Shared(lanes or Lanes(), self.settings)
        self._levels = [
            StackMember(shared, index, tier, name)
            for index, (tier, name) in enumerate(zip(tiers, self.names, strict=True))
        ]
        top = self._levels[0]
        if top.in_memory and top.writes and top.settings.write == "through":
            shared.lender = top.tier
        self._placing = Placer(shared, self._levels)
        self._reader = Reader(shared, self._levels, self._placing.promote)
        self._lookup = TierLookup(shared, self._levels)
        self._prefetching = Prefetching(shared, self._reader, self._levels)
        self.feeding = BackgroundWriter(shared, self._placing)
        self.gate = CostGate(
            [level.estimate for level in self._levels], self.settings.load_timeout_s, shared.lock
        )
        self._loads: Counter[str] = Counter()
        self._refused_keys = 0
        if lanes is None:
            close_at_exit(self)
        for level in self._levels[:-1]:
            level.tier.evicting_of = partial(self._placing.lacking_below, level)
            level.tier.evicting = partial(self._placing.demote, level)

    # Reading

    def find(
        self,
        keys: Keys,
        *,
        contiguous: bool = True,
        saved_s: float = math.inf,
        num_bytes: int = 0,
    ) -> list[int]:
        """Return, for each key, the fastest tier that seems to have it, or -1.

        A hint: nothing is read. With `contiguous` only an unbroken head is of use: everything behind the first key that
        no tier has is -1, and slower tiers are not asked for it. Once what is fed is there, returns after
        `lookup_timeout_s` at the latest; a tier that has not answered has nothing.

        `saved_s`    seconds that having all would save: a tier is waited for where that can be expected to pay, and
                     half of it and 15 ms at most; else nobody waits, and what it has is found out beside
        `num_bytes`  bytes of all their records
        """
        check_keys(keys)
        if self._shared.is_closed or not keys:
            return [-1] * len(keys)
        self.feeding.wait(self.settings.load_timeout_s, keys)
        self._lookup.try_again(keys)
        saved_s = saved_s if self.settings.gate else math.inf
        return self._lookup.find(keys, contiguous=contiguous, saved_s=saved_s, num_bytes=num_bytes)

    def surely_lacks(self, key: bytes) -> bool:
        """Return whether no tier has a key, as far as is known without a wait or a request."""
        if self._shared.is_closed:
            return True
        return not self.feeding.has([key]).any() and self._lookup.surely_lacks(key)

    def choose(
        self,
        keys: Keys,
        found: Sequence[int],
        sizes: Sequence[int],
        recompute_s: Callable[[int], float],
        *,
        step: int = 1,
    ) -> int:
        """Return the number of leading keys to load, so that loading them and computing the rest takes least.

        `found`        what `find` said; nothing is loaded from the first -1 on
        `sizes`        bytes of each key's record
        `recompute_s`  seconds to compute what is behind the first n keys, for n from 0 to all; what it
                       takes to put n loaded keys in place belongs to it
        `step`         keys per block: the answer is a multiple of it

        A tier that is refused is measured in the background, each `PROBE_S`, so that it is used again
        when it has become fast.
        """
        check_keys(keys)
        if not len(keys) == len(found) == len(sizes):
            raise ConfigError(
                f"{len(keys)} keys, {len(found)} places and {len(sizes)} sizes; give one for each key"
            )
        if self._shared.is_closed:
            return 0
        self._lookup.remember(keys, found, sizes)
        if not self.settings.gate:
            whole = list(found).index(-1) if -1 in found else len(found)
            return whole - whole % step
        choice = self.gate.choose(found, sizes, recompute_s, step)
        self._shared.note_refused(keys[choice.num_keys : choice.num_found], keys[: choice.num_keys])
        if choice.refused:
            with self._shared.lock:
                self._refused_keys += choice.num_found - choice.num_keys
            for index in choice.refused:
                self._lookup.probe(self._levels[index])
        return choice.num_keys

    def load(
        self,
        keys: Keys,
        sizes: Sequence[int],
        timeout_s: float | None = None,
        *,
        found: Sequence[int] | None = None,
        saved_s: float = math.inf,
    ) -> tuple[list[Outcome], list[memoryview | None]]:
        """Return outcomes and records, each from the fastest tier that gives it. `HIT` is verified; else there is no record.

        The records are the caller's, who may give them back when they are of no more use.

        `sizes`    bytes of each record
        `found`    what `find` said; saves asking tiers in vain. Keys with -1 are not looked for
        `saved_s`  seconds that having all would save. When nothing has come for half of that and 15 ms, what is still
                   to come is `TIMEOUT`, and the tier is left alone for a while; as long as records come, all is well

        Returns after `timeout_s` (default `load_timeout_s`) at the latest; what has not come is `TIMEOUT`.
        Every other outcome is the first cause met that is more than absence.
        """
        check_sizes(keys, sizes)
        if found is not None and len(found) != len(keys):
            raise ConfigError(f"{len(keys)} keys and {len(found)} places; give one for each")
        shared = self._shared
        if shared.is_closed or not keys:
            return [Outcome.SKIPPED] * len(keys), [None] * len(keys)
        self._lookup.try_again(keys)
        seconds = self.settings.load_timeout_s if timeout_s is None else max(0.0, timeout_s)
        self.feeding.wait(seconds, keys)
        idle_s = patience_s(saved_s) if self.settings.gate else math.inf
        fetch = Fetch(shared, keys, sizes, Deadline(shared.lanes, seconds), idle_s)
        self._reader.read(fetch, found or [0] * len(keys))
        with shared.lock:
            self._loads.update(fetch.outcomes)
        return fetch.outcomes, fetch.buffers

    def prefetch(self, keys: Keys, sizes: Sequence[int]) -> Prefetch:
        """Begin to load a waiting request's records into the fastest tier, leased there; returns at once.

        `sizes`  bytes of each record
        """
        check_sizes(keys, sizes)
        return self._prefetching.begin(keys, sizes)

    # Writing

    def wanted(self, keys: Keys) -> Bits:
        """Return the tiers that want each key, as bits; a key with 0 is not worth encoding for `store` now.

        Asks no tier that could wait.
        """
        check_keys(keys)
        if self._shared.is_closed or not keys:
            return np.zeros(len(keys), np.uint8)
        return self._placing.wanted(keys)

    def store(self, keys: Keys, records: Buffers, wanted: Bits | None = None) -> list[Outcome]:
        """Keep sealed records, which become the stack's: the caller writes to them no more.

        `wanted` is what `wanted` has just said of these keys; without it the tiers are asked again.
        Raises `RecordError` where a record does not carry its key, or is not signed with the stack's tier key. Never waits. `STORED` where a tier has the record or has
        taken it into its queue, `PRESENT` where all that want it have it or are about to, `SKIPPED` where nobody took it. Behind a refused head no tail is stored.
        """
        check_own(keys, records, self.settings.key)
        return self._placing.store(keys, records, wanted) if keys else []

    def store_evicted(self, keys: Keys, records: Buffers) -> list[Outcome]:
        """Store blocks that the device evicted, where tiers are written `back`; else as `store`.

        A tier below another one gets what that one evicts, if it is a tier that tells (`Tier.evicting`).
        """
        check_own(keys, records, self.settings.key)
        return self._placing.store_evicted(keys, records) if keys else []

    @property
    def counts_uses(self) -> bool:
        """Whether a block is stored only from its second use on (`second_use`)."""
        return self._placing.counts_uses

    def count_use(self, keys: Keys) -> None:
        """Count that a prompt was asked for, which keeps its records from ageing."""
        check_keys(keys)
        if keys and not self._shared.is_closed:
            self._placing.count_use(keys)

    def call_later(self, level: int, function: Work) -> None:
        """Call what does not raise on the thread that writes to a tier; at `close` at the latest."""
        if not self._shared.is_closed:
            self._levels[level].stores.submit(self, function, function)

    def delete(self, keys: Keys) -> None:
        """Forget these keys in every tier. Waits for each, up to `STORE_TIMEOUT_S` for all together.

        The fastest first: what it is just letting go to make room is then on its way to where it is deleted next.
        """
        check_keys(keys)
        deadline = Deadline(self._shared.lanes, STORE_TIMEOUT_S)
        self.feeding.wait(deadline.left_s, keys)
        with self._shared.deletions.of(keys, deadline):
            self._lookup.in_turn(lambda tier: tier.delete(keys, STORE_TIMEOUT_S), deadline)
        with self._shared.lock:
            for level in self._levels:
                self._shared.whereabouts.clear(keys, level.index)

    # Buffers

    def buffers(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return buffers for records, used before where there are some: cheaper than fresh memory."""
        return self._shared.pool.take(sizes)

    def records(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return buffers for records to `store`: a tier's own memory as far as it lends some."""
        lender = self._shared.lender
        lent = [] if lender is None or self._shared.is_closed else lender.lend(sizes)
        return lent + self._shared.pool.take(sizes[len(lent) :])

    def give_back(self, buffers: Sequence[memoryview | None]) -> None:
        """Return buffers that are of no more use, never those given to `store`."""
        self._shared.give_back(buffers)

    # Life

    @property
    def is_closed(self) -> bool:
        """Whether it finds and stores nothing any more."""
        return self._shared.is_closed

    def drain(self, timeout_s: float, keys: Keys | None = None) -> bool:
        """Wait until everything queued is written, or these keys are; return whether it is."""
        if self._shared.is_closed:
            return True
        deadline = Deadline(self._shared.lanes, timeout_s)
        is_fed = keys is not None or self.feeding.drain(deadline)
        return is_fed and self._placing.drain(deadline, keys)

    def flush(self) -> None:
        """Drain, then have every tier write its buffers; `close_timeout_s` for each of the two."""
        self.drain(self.settings.close_timeout_s)
        self._lookup.in_all_lanes(lambda tier: tier.flush(), self.settings.close_timeout_s)

    def close(self) -> None:
        """Write queued records, within `close_timeout_s`, and close all tiers. Twice does nothing.

        A tier that hangs is left to its lane, and closed when that comes back.
        """
        shared = self._shared
        if shared.is_closed:
            return
        self._prefetching.close()
        deadline = Deadline(shared.lanes, self.settings.close_timeout_s)
        if not self.drain(deadline.left_s):
            left_bytes = sum(writer.waiting_bytes for writer in self._placing.writers)
            _log.warning(
                "%r closes after %g s (close_timeout_s) without having written all: %d bytes waited",
                self,
                self.settings.close_timeout_s,
                left_bytes,
            )
        for level in self._levels:
            level.say_changes()
        with shared.lock:
            shared.is_closed = True
        self.feeding.close()
        for level in self._levels:
            level.loads.close()
            level.stores.close()
        for level in filter(StackMember.begins_to_close, self._levels):
            # In threads of their own: what they close may hang.
            try:
                shared.lanes.spawn(f"quire {level.name} closing", partial(self._close_tier, level))
            except RuntimeError:  # the system has no thread left; at its end a process begins none
                if all(signal.wait(deadline.left_s) for signal in self._ends(level)):
                    self._close_tier(level)
                level.closed.set()
        for level in self._levels:
            level.closed.wait(deadline.left_s)

    def abandon(self) -> None:
        """Do nothing any more, in a process that was forked from the one that opened it and owns the tiers.

        Every call finds and stores nothing, and none waits.
        """
        self._shared.abandon()
        self.feeding.abandon()

    def stats(self, *, is_settled: bool = True) -> StackStats:
        """Return the counts of every tier: after queued jobs are done, or (`is_settled` False) as they are now."""
        if is_settled:
            self.feeding.catch_up()
        with self._shared.lock:
            queued = [writer.waiting_bytes for writer in self._placing.writers]
            loads, refused = counted(self._loads), self._refused_keys
        reports = list(map(StackMember.report, self._levels, queued))
        return StackStats(reports, loads, refused, self.feeding.passed_over)

    def check(self) -> None:
        """Verify the invariants of the stack and of every tier; raises `InvariantError`."""
        if self._shared.is_abandoned:
            return
        for level, writer in zip(self._levels, self._placing.writers, strict=True):
            with self._shared.lock:
                counted, held = writer.count()
            if counted != held:
                raise InvariantError(
                    f"{level.name}: {counted} bytes are said to wait, {held} do; a bug in quire"
                )
            level.tier.check()
        self._reader.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<TierStack {' > '.join(self.names)}>"

    def __str__(self) -> str:
        return str(self.stats())

    def _ends(self, level: StackMember) -> list[Signal]:
        """Return the signals after which nobody can call a tier any more."""
        levels = self._levels if level.in_memory else [level]
        return [lane.ended for each in levels for lane in (each.loads, each.stores)]

    def _close_tier(self, level: StackMember) -> None:
        """Close a tier when no call can reach it any more: its lanes have ended, or, in memory, all have."""
        for signal in self._ends(level):
            signal.wait()
        with suppress(Exception):  # it is closed as well as it can be
            level.tier.close()
        level.closed.set()
