"""The policy of this project: evicts what is least likely to be come back to."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from quire.core.policies.base import WHOLE, Capacity, Entry, Policy, Tick, Visit
from quire.core.policies.mind import TRIAL, TRUST, Mind, Walk
from quire.core.policies.reentry import Record, bucket

SUPERSEDED, BEYOND, FIRST_CLASS = range(3)
"""Queues: what another request has gone on from, what follows prompts, then the classes."""

TRUNK = 8
"""A run that so many branches continue is shared by all: leaving it says little."""


class Learned(Policy):
    """Evicts the blocks that are least likely to save recomputation for the time they are held.

    Every request leaves a record at the end of its chain. Its class follows from how many turns
    came before, how much was new, and how long the answer was; how soon records of
    a class are come back to is learned while serving (`reentry`). What a later turn has
    gone on from is evicted first, then answers where they are never come back to (prompts often
    repeat them in other tokens), then the class and age of the lowest expected hits per
    block and second. A turn whose blocks were evicted is recognised by the last request that used them.
    A shadow of LRU on the same requests is the guard: where LRU would have found more, the policy is
    LRU. See docs/decisions/learned-policy.md for the study.

    An entry's `note` is the record of the request that used it last, its `uses` its age. A queue is a heap
    by age. An entry in it may have gone, or belong in another queue since a later turn went on from it:
    that is seen when it comes to the front. `_fronts` holds rank, age and entry of the first of each
    class, `_front_of` its queue by the entry's id; `_doubtful` names the queues to look at again.
    """

    watches = True
    remembers = True

    def __init__(self, tick: Tick, capacity: Capacity, mind: Mind | None = None) -> None:
        super().__init__(tick, capacity)
        self._mind = mind or Mind()
        self._mind.doubts.append(self._doubt)
        self._mind.exposures.append(self._expose)
        self._heaps: dict[int, list[tuple[float, int, Entry]]] = {}
        self._held: dict[int, Entry] = {}
        self._fronts: dict[int, tuple[float, float, Entry]] = {}
        self._front_of: dict[int, int] = {}
        self._doubtful: dict[int, None] = {}
        self._ranked = (0.0, 0)

    def sibling(self) -> Policy:
        return Learned(self.tick, self.capacity, self._mind)

    # -- requests --------------------------------------------------------------------------

    def opened(self, visit: Visit, entry: Entry | None) -> None:
        mind = self._mind
        mind.now = visit.now
        mind.model.advance(visit.now)
        walk = mind.walk = Walk(Record(visit.number), 0)
        visit.note = walk
        if entry is not None:
            walk.found = entry.end
            walk.fan_out = entry.num_below
            rest = entry.below
            while rest is not None and rest.below is not None:
                rest = rest.below
            walk.rest = rest
            previous = entry.note
            if isinstance(previous, Record) and _goes_on(previous, walk.found):
                if previous.answered:
                    self._learn_of_answers(previous, walk.found)
                self._continue(walk, previous)
        walk.reached = walk.found
        ghost = mind.ghosts.get(visit.lost_by)
        if ghost is not None:
            # The end of a prompt is often written anew: what comes back at all is all taken to come back.
            walk.reached = max(
                min(visit.prompt // visit.block_size, ghost.prompt), walk.found + visit.lost
            )
            walk.path.append((ghost, walk.reached - walk.found))
            if not walk.continues and _goes_on(ghost, walk.reached):
                self._continue(walk, ghost)

    def touched(self, entry: Entry) -> None:
        walk = self._mind.walk
        assert walk is not None
        owner = entry.note
        if isinstance(owner, Record):
            path = walk.path
            if path and path[-1][0] is owner:
                path[-1] = (owner, path[-1][1] + entry.num_blocks)
            else:
                path.append((owner, entry.num_blocks))
        entry.note = walk.record

    def closing(self, visit: Visit, entry: Entry | None) -> None:
        mind = self._mind
        walk = visit.note
        assert isinstance(walk, Walk)
        mind.now = visit.now
        mind.walk = walk
        visit.note = None
        record = walk.record
        prompt = visit.prompt // visit.block_size
        record.time = visit.now
        record.prompt = prompt
        record.found = min(walk.reached, prompt)
        mind.num_requests += 1
        self._judge(walk, entry.end if entry is not None else 0, prompt)
        record.answered = entry is not None and entry.end > prompt
        record.trimmed = record.answered and mind.trims and mind.num_requests % TRIAL > 0
        record.closed = True
        if prompt > 1:
            mind.doubt(record.kind)
            mind.model.watch(record, self._cells(walk, visit))

    def _continue(self, walk: Walk, previous: Record) -> None:
        """A request goes on from where the previous one ended."""
        mind = self._mind
        walk.continues = True
        walk.record.turn = previous.turn + 1
        previous.superseded = True
        mind.doubt(previous.kind)
        mind.model.returned(previous, mind.now)
        if walk.rest is not None and walk.rest.note is previous:
            for expose in mind.exposures:
                expose(walk.rest)

    def _cells(self, walk: Walk, visit: Visit) -> tuple[int, ...]:
        """Return the values of a request's features, each its own number."""
        record = walk.record
        turn = (0, 1, 2, 3, 3)[record.turn] if record.turn < 5 else 4
        if not walk.continues and record.found and walk.fan_out < TRUNK:
            turn = 5
        new = bucket((record.prompt - record.found) * visit.block_size // 64, 15)
        return turn, 16 + new, 64 + 16 * turn + new, 256 + bucket(visit.output, 15)

    def _learn_of_answers(self, previous: Record, found: int) -> None:
        if previous.trimmed:
            return
        answers = self._mind.answers
        answers[0] += found > previous.prompt
        answers[1] += 1
        if answers[1] > TRUST:
            answers[0] /= 2
            answers[1] /= 2

    def _judge(self, walk: Walk, end: int, asked: int) -> None:
        """Find out what LRU would have found, and put the request on top of its stack."""
        mind, capacity = self._mind, self.capacity()
        lru_found = 0
        for owner, num_blocks in reversed(walk.path):
            room = capacity - mind.shadow.above(owner, capacity)
            lru_found += max(min(num_blocks, room), 0)
            if room < num_blocks:
                break
        for owner, num_blocks in walk.path:
            mind.shadow.take(owner, num_blocks)
        if walk.record.slot < 0 and end:
            mind.shadow.push(walk.record, end, capacity)
        mind.judge(walk.found, lru_found, asked)

    # -- entries ---------------------------------------------------------------------------

    def released(self, entry: Entry) -> None:
        entry.note = self._record(entry)
        entry.uses = self.tick()
        self.returned(entry)

    def returned(self, entry: Entry) -> None:
        self._held[id(entry)] = entry
        if entry.evictable:
            self._push(entry)

    def referenced(self, entry: Entry) -> None:
        del self._held[id(entry)]
        queue = self._front_of.get(id(entry))
        if queue is not None:
            self._doubt(queue - FIRST_CLASS)

    def exposed(self, entry: Entry) -> None:
        self._push(entry)

    def split(self, upper: Entry, lower: Entry) -> None:
        self._held[id(upper)] = upper

    def evicting(self, entry: Entry, num_blocks: int) -> None:
        record = self._record(entry)
        is_answer = record.trimmed and entry.end - num_blocks >= record.prompt
        if not record.superseded and not is_answer:
            self._mind.remember(record)

    def victim(self) -> tuple[Entry, int] | None:
        if self._mind.is_lru:
            heads = [self._head(queue) for queue in list(self._heaps)]
            oldest = min((head for head in heads if head is not None), key=_age, default=None)
            return (oldest, WHOLE) if oldest is not None else None
        self._look()
        head = self._head(SUPERSEDED)
        if head is not None:
            return head, WHOLE
        head = self._head(BEYOND)
        if head is not None:
            return head, head.end - self._record(head).prompt
        return (min(self._fronts.values())[2], WHOLE) if self._fronts else None

    def order(self) -> Iterator[Entry]:
        held: dict[int, Entry] = {}
        for heap in self._heaps.values():
            for pair in heap:
                if self._holds(pair):
                    held[id(pair[2])] = pair[2]
        if self._mind.is_lru:
            yield from sorted(held.values(), key=_age)
        else:
            yield from sorted(
                held.values(), key=lambda e: (min(self._queue(e), FIRST_CLASS), self._rank(e))
            )

    def _rank(self, entry: Entry) -> tuple[float, float]:
        mind = self._mind
        return mind.model.rank_of(self._record(entry), mind.now), _age(entry)

    def _record(self, entry: Entry) -> Record:
        if isinstance(entry.note, Record):
            return entry.note
        walk = self._mind.walk
        return walk.record if walk is not None else Record()

    def _queue(self, entry: Entry) -> int:
        record = self._record(entry)
        if record.superseded:
            return SUPERSEDED
        if record.trimmed and entry.end > record.prompt:
            return BEYOND
        return FIRST_CLASS + record.kind

    def _look(self) -> None:
        """Bring the fronts of all classes up to date."""
        mind, fronts = self._mind, self._fronts
        ranked = (mind.now, mind.model.moves)
        if ranked != self._ranked:
            self._ranked = ranked
            for queue, (_, age, entry) in fronts.items():
                fronts[queue] = (self._rank(entry)[0], age, entry)
        while self._doubtful:
            queue, _ = self._doubtful.popitem()
            head = self._head(queue)
            if head is not None:
                fronts[queue] = (*self._rank(head), head)
                self._front_of[id(head)] = queue

    def _expose(self, entry: Entry) -> None:
        """An entry may belong in another queue than before."""
        if id(entry) in self._held and entry.evictable:
            self._push(entry)

    def _doubt(self, kind: int) -> None:
        """The front of a class may not be what it was."""
        queue = FIRST_CLASS + kind
        front = self._fronts.pop(queue, None)
        if front is not None:
            del self._front_of[id(front[2])]
        self._doubtful[queue] = None

    def _push(self, entry: Entry) -> None:
        queue = self._queue(entry)
        heap = self._heaps.setdefault(queue, [])
        if len(heap) > 2 * len(self._held) + 64:
            current = {id(pair[2]): pair for pair in heap if self._holds(pair)}
            heap[:] = current.values()
            heapq.heapify(heap)
        heapq.heappush(heap, (_age(entry), self.tick(), entry))
        front = self._fronts.get(queue)
        if queue >= FIRST_CLASS and (front is None or _age(entry) <= front[1]):
            self._doubt(queue - FIRST_CLASS)

    def _head(self, queue: int) -> Entry | None:
        """Return the oldest entry of a queue; drop what no longer belongs there."""
        heap = self._heaps.get(queue)
        while heap:
            holds, entry = self._holds(heap[0]), heap[0][2]
            if holds and self._queue(entry) == queue:
                return entry
            heapq.heappop(heap)
            if holds:
                self._push(entry)
        return None

    def _holds(self, pair: tuple[float, int, Entry]) -> bool:
        """Whether a pair is up to date but for the queue that its entry belongs in."""
        age, _, entry = pair
        return id(entry) in self._held and entry.uses == age and entry.evictable


def _goes_on(previous: Record, reached: int) -> bool:
    """Whether a request that shares so many blocks continues the previous one.

    It may leave out a tail of what was new in it: the end of a prompt is often written anew.
    """
    new = previous.prompt - previous.found
    fits = reached >= previous.found + (new + 1) // 2
    return fits and previous.closed and not previous.superseded and previous.prompt > 1


def _age(entry: Entry) -> float:
    return entry.uses
