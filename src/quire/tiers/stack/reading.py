"""Reading from the tiers of a stack: lanes read batches, misses go on to the next tier.

A batch that is late is a miss. `fetching.py` has the words: fetch, batch (a read batch), ticket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from quire.errors import InvariantError
from quire.tiers.base import Outcome
from quire.tiers.contents.batches import batches
from quire.tiers.stack.fetching import BatchState, Fetch, ReadBatch, Span, Ticket
from quire.tiers.stack.lanes import RESOLUTION_S, Deadline
from quire.tiers.stack.member import Shared, StackMember, guarded
from quire.tiers.stack.writing import BATCH_KEYS


class Reader:
    """The reads of a stack.

    `keep`  called with a level, keys and buffers that hold verified records, before anybody gets them

    Every batch in `_flights` is waiting or being read, and has its keys there: so one key is read from one
    tier once at a time, but for requests that could not wait for the first.
    """

    def __init__(
        self,
        shared: Shared,
        levels: Sequence[StackMember],
        keep: Callable[[StackMember, list[bytes], list[memoryview], int], None],
    ) -> None:
        self._shared = shared
        self._levels = levels
        self._keep = keep
        self._flights: list[dict[bytes, tuple[ReadBatch, int]]] = [{} for _ in levels]

    def read(self, fetch: Fetch, levels: Sequence[int]) -> None:
        """Read each key from the tier that `levels` names, or else from slower ones; -1 is a miss."""
        by_level: dict[int, list[int]] = {}
        for index, level in enumerate(levels):
            by_level.setdefault(level, []).append(index)
        with self._shared.lock:
            fetch.miss(by_level.pop(-1, []))
        for level in sorted(by_level, reverse=True):  # what takes longest begins first
            self._ask(fetch, level, by_level[level])
        self._wait(fetch)

    def _wait(self, fetch: Fetch) -> None:
        """Return when every key has an outcome, the deadline has passed, or another thread has ended it."""
        lock = self._shared.lock
        while True:
            fetch.signal.clear()
            with lock:
                if not fetch.pending or (fetch.is_over and not fetch.tickets):
                    fetch.is_over = True
                    return
                tickets = list(fetch.tickets)
            left_s = fetch.deadline.left_s
            if not left_s:
                break
            overdue = [ticket for ticket in tickets if ticket.left_s <= RESOLUTION_S]
            for ticket in overdue:
                missing = self._give_up(ticket)
                self._ask(fetch, ticket.batch.level.index + 1, missing)
            if not overdue:
                fetch.signal.wait(min([left_s, *(ticket.left_s for ticket in tickets)]))
        self.end(fetch)

    def end(self, fetch: Fetch) -> None:
        """Give up the records that have not come."""
        with self._shared.lock:
            fetch.is_over = True
            tickets = list(fetch.tickets)
        for ticket in tickets:
            self._give_up(ticket)
        fetch.signal.set()

    def check(self) -> None:
        """Verify that what is in flight is wanted or being read; raises `InvariantError`."""
        with self._shared.lock:
            for level, flights in zip(self._levels, self._flights, strict=True):
                for batch, _ in flights.values():
                    if batch.state is BatchState.DONE or (
                        batch.state is BatchState.WAITING and not batch.tickets
                    ):
                        raise InvariantError(
                            f"{level.name}: a batch of {len(batch.keys)} keys is {batch.state.name} "
                            f"with {len(batch.tickets)} tickets, and still found; a bug in quire"
                        )

    # Asking

    def _ask(self, fetch: Fetch, first: int, indices: Sequence[int]) -> None:
        """Read keys from the first tier on from `first` that is in service."""
        if not indices:
            return
        for level in self._levels[first:]:
            with self._shared.lock:
                if level.reading.allows:
                    break
                level.meter.loads[Outcome.SKIPPED] += len(indices)
                if not fetch.is_over:
                    for index in indices:
                        fetch.settle(index, Outcome.SKIPPED)
        else:
            with self._shared.lock:
                if not fetch.is_over:
                    fetch.miss(indices)
            fetch.signal.set()
            return
        new = self._tickets(fetch, level, indices)
        for batch in new:
            if level.in_memory:
                self._run(batch)
            else:
                level.loads.submit(fetch, partial(self._run, batch), partial(self._drop, batch))
        if new:
            fetch.signal.set()

    def _tickets(self, fetch: Fetch, level: StackMember, indices: Sequence[int]) -> list[ReadBatch]:
        """Join the batches that are on their way, and return new ones for the rest."""
        deadline, idle_s = self._shares(fetch, level)
        left_s = deadline.left_s
        joined: dict[int, tuple[ReadBatch, list[int], list[int]]] = {}
        new: list[ReadBatch] = []
        with self._shared.lock:
            if fetch.is_over:
                return []
            flights = self._flights[level.index]
            rest: list[int] = []
            for index in indices if flights else ():
                batch, place = flights.get(fetch.keys[index], (None, 0))
                if batch is None or not _is_joinable(batch, left_s, fetch.sizes[index], place):
                    rest.append(index)
                    continue
                _, own, places = joined.setdefault(id(batch), (batch, [], []))
                own.append(index)
                places.append(place)
            for batch, own, places in joined.values():
                self._issue(Ticket(fetch, batch, own, places, deadline, idle_s))
                level.meter.joined += len(own)
            unread = rest if flights else indices
            sizes = [fetch.sizes[index] for index in unread]
            most = int(self._shared.settings.batch_bytes)
            for part in batches(unread, sizes, most, BATCH_KEYS):
                batch = ReadBatch(fetch, level, part, deadline)
                self._issue(Ticket(fetch, batch, part, range(len(part)), deadline, idle_s))
                # What is in memory is read at once: nobody can join it.
                for place, key in enumerate(() if level.in_memory else batch.keys):
                    flights.setdefault(key, (batch, place))
                span = fetch.spans.setdefault(level.index, Span(self._shared.lanes.now()))
                span.open_tickets += 1
                new.append(batch)
        return new

    def _issue(self, ticket: Ticket) -> None:
        ticket.batch.tickets.append(ticket)
        ticket.fetch.tickets.append(ticket)

    def _shares(self, fetch: Fetch, level: StackMember) -> tuple[Deadline, float]:
        """Return a tier's deadline, and how long nothing may come: half of what is left where a slower one may help."""
        left_s, idle_s = fetch.deadline.left_s, fetch.idle_s
        if fetch.is_patient or level.in_memory:
            return Deadline(self._shared.lanes, left_s), math.inf
        most_idle_s = max(0.0, fetch.most_idle_s - idle_s)
        if any(other.reading.allows for other in self._levels[level.index + 1 :]):
            left_s, most_idle_s = left_s / 2, most_idle_s / 2
        left_s = min(left_s, level.settings.load_timeout_s or left_s)
        return Deadline(self._shared.lanes, left_s), idle_s + most_idle_s

    # Reading, in a lane

    def _run(self, batch: ReadBatch) -> None:
        level, lanes, lock = batch.level, self._shared.lanes, self._shared.lock
        with lock:
            if not batch.tickets:
                self._land(batch)
                return
            batch.state = BatchState.READING
            rise, epoch = self._shared.deletions.read(lanes.signal()), self._shared.epoch
            batch.gone = rise.gone
            left_s = batch.allowed_s = max(ticket.deadline.left_s for ticket in batch.tickets)
        buffers = self._shared.pool.take(batch.sizes)
        began_s = lanes.now()
        if left_s:
            outcomes = guarded(
                lambda: level.tier.get(batch.keys, buffers, left_s, batch.came), len(batch.keys)
            )
        else:
            outcomes = [Outcome.TIMEOUT] * len(batch.keys)
        took_s = max(0.0, lanes.now() - began_s)
        hits = [place for place, outcome in enumerate(outcomes) if outcome is Outcome.HIT]
        if hits and level.index:
            with lock:
                chosen = self._shared.deletions.kept(rise, [batch.keys[place] for place in hits])
            kept = [hits[at] for at in chosen]
            self._keep(
                level,
                [batch.keys[place] for place in kept],
                [buffers[place] for place in kept],
                epoch,
            )
        with lock:
            self._shared.deletions.over(rise)
            self._count(batch, outcomes, hits, took_s)
            self._land(batch, BatchState.READING)
            tickets = list(batch.tickets)
        free: dict[int, memoryview] = dict(enumerate(buffers))
        shares: dict[Ticket, list[memoryview | None]] = {}
        for ticket in tickets:
            shares[ticket] = [
                free.pop(place, None) or self._copied(ticket.fetch.sizes[index], buffers[place])
                if outcomes[place] is Outcome.HIT
                else None
                for index, place in zip(ticket.indices, ticket.places, strict=True)
            ]
        self._deliver(batch, outcomes, shares)
        self._shared.pool.give_back([*free.values()])

    def _copied(self, size: int, record: memoryview) -> memoryview:
        (copy,) = self._shared.pool.take([size])
        copy[:] = record
        return copy

    def _drop(self, batch: ReadBatch) -> None:
        with self._shared.lock:
            self._land(batch, BatchState.READING)
        self._deliver(batch, [Outcome.SKIPPED] * len(batch.keys), {})

    def _deliver(
        self,
        batch: ReadBatch,
        outcomes: list[Outcome],
        shares: dict[Ticket, list[memoryview | None]],
    ) -> None:
        """Give what was read to those who still wait; what they lack they ask of the next tier."""
        missing: list[tuple[Fetch, list[int]]] = []
        with self._shared.lock:
            batch.state = BatchState.DONE
            tickets, batch.tickets = batch.tickets, []
            for ticket in tickets:
                fetch = ticket.fetch
                fetch.tickets.remove(ticket)
                share = shares.pop(ticket, [None] * len(ticket.indices))
                missed: list[int] = []
                for index, place, buffer in zip(ticket.indices, ticket.places, share, strict=True):
                    fetch.settle(index, outcomes[place], buffer)
                    if outcomes[place] is not Outcome.HIT:
                        missed.append(index)
                self._measure(ticket, len(missed))
                missing.append((fetch, missed))
        for share in shares.values():
            self._shared.pool.give_back([each for each in share if each is not None])
        for fetch, missed in missing:
            if missed:
                self._ask(fetch, batch.level.index + 1, missed)
            else:
                fetch.signal.set()

    def _land(self, batch: ReadBatch, state: BatchState = BatchState.DONE) -> None:
        """Let nobody join a batch any more. The lock is held."""
        flights = self._flights[batch.level.index]
        batch.state = state
        for key in batch.keys if flights else ():
            if flights.get(key, (None, 0))[0] is batch:
                del flights[key]

    def _count(
        self, batch: ReadBatch, outcomes: list[Outcome], hits: list[int], took_s: float
    ) -> None:
        level = batch.level
        if batch.tickets:
            level.meter.loads.update(outcomes)
            level.meter.loaded_bytes += sum(batch.sizes[place] for place in hits)
        else:  # counted when they were given up
            level.meter.late += len(batch.keys)
        level.meter.load_s += took_s
        if not level.answers_at_once:
            found = [batch.keys[place] for place in hits]
            self._shared.whereabouts.mark(found, level.index)
            gone = _GONE if level.tier.trust is None else (*_GONE, Outcome.FOREIGN)  # put anew
            lost = [batch.keys[place] for place, each in enumerate(outcomes) if each in gone]
            self._shared.whereabouts.clear(lost, level.index)
        had_time = batch.allowed_s >= level.patience_s or Outcome.TIMEOUT not in outcomes
        if had_time and any(ticket.is_first for ticket in batch.tickets):
            level.answered("load", outcomes)

    def _measure(self, ticket: Ticket, num_missed: int) -> None:
        """Tell the gate's estimate what a fetch's read of a tier took. The lock is held."""
        level = ticket.batch.level
        span = ticket.fetch.spans.get(level.index)
        if span is None or not ticket.is_first:
            return
        span.open_tickets -= 1
        if not num_missed:
            span.num_bytes += sum(ticket.batch.sizes)
        if not span.open_tickets:
            del ticket.fetch.spans[level.index]
            if span.num_bytes:
                took_s = max(0.0, self._shared.lanes.now() - span.began_s)
                level.estimate.observe(span.num_bytes, took_s)

    # Giving up

    def _give_up(self, ticket: Ticket) -> Sequence[int]:
        """Close a ticket that waited long enough; return the indices that it leaves without an outcome."""
        fetch, batch = ticket.fetch, ticket.batch
        level = batch.level
        with self._shared.lock:
            if ticket not in fetch.tickets:
                return []
            fetch.tickets.remove(ticket)
            batch.tickets.remove(ticket)
            level.meter.loads[Outcome.TIMEOUT] += len(ticket.indices)
            for index in ticket.indices:
                fetch.settle(index, Outcome.TIMEOUT)
            span = fetch.spans.pop(level.index, None)
            if span is not None:
                # One failure per fetch and tier; and it took so long at least, which the gate may know.
                waited_s = max(0.0, self._shared.lanes.now() - span.began_s)
                if ticket.deadline.passed or fetch.is_over:
                    level.given_up("load", waited_s)
                else:
                    level.hung(waited_s)
                asked = sum(ticket.sizes)
                if waited_s > level.estimate.seconds(asked):
                    level.estimate.observe(asked, waited_s)
            if not batch.tickets and batch.state is BatchState.WAITING:
                self._land(batch)
        return ticket.indices


_GONE = (Outcome.ABSENT, Outcome.CORRUPT, Outcome.UNTRUSTED, Outcome.FORGED)


def _is_joinable(batch: ReadBatch, left_s: float, size: int, place: int) -> bool:
    """Whether a batch has not used up its time, and reads a record of the same size that is not deleted meanwhile."""
    has_time = 2 * batch.deadline.left_s >= left_s
    return has_time and batch.sizes[place] == size and batch.keys[place] not in batch.gone
