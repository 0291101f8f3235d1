"""The policy of this project: evicts what is least likely to be come back to."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from quire0.core.policies.base import Capacity, Entry, Policy, Tick, Visit
from quire0.core.policies.mind import TRIAL, TRUST, Mind, Trail
from quire0.core.policies.reentry import Record, bucket

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
    block and second. Turns are known again after eviction by the names of their first evicted
    blocks. A shadow of LRU on the same requests is the guard: where LRU would have found more,
    the policy is LRU. See docs/decisions/learned-policy.md for the study.

    A queue is a heap by age. What stands in it may have gone, or belong in another queue since a
    later turn has gone on from it: that is seen when it comes to the front. `_fronts` holds rank, age and entry of the first of each
    class, `_front_of` its queue by the entry's id; `_doubtful` names the queues to look at again.
    """

    watches = True
    remembers = True

    def __init__(self, tick: Tick, capacity: Capacity, mind: Mind | None = None) -> None:
        super().__init__(tick, capacity)
        self._mind = mind or Mind()
        self._mind.doubts.append(self._doubt)
        self._heaps: dict[int, list[tuple[float, int, Entry]]] = {}
        self._num_cached = 0
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
        trail = mind.trail = Trail(Record(), 0, None, 0)
        visit.note = trail
        if entry is None:
            return
        trail.found = entry.end
        trail.fan_out = entry.num_below
        previous = trail.previous = entry.note if isinstance(entry.note, Record) else None
        rest = entry.below
        while rest is not None and rest.below is not None:
            rest = rest.below
        trail.rest = rest
        if previous is not None and _goes_on(previous, trail.found):
            if previous.answered:
                self._learn_of_answers(previous, trail.found)
            self._continue(trail, previous)

    def touched(self, entry: Entry) -> None:
        trail = self._mind.trail
        assert trail is not None
        owner = entry.note
        if isinstance(owner, Record):
            path = trail.path
            if path and path[-1][0] is owner:
                path[-1] = (owner, path[-1][1] + entry.num_blocks)
            else:
                path.append((owner, entry.num_blocks))
        entry.note = trail.record
        entry.queue = FIRST_CLASS

    def closing(self, visit: Visit, entry: Entry | None) -> None:
        mind = self._mind
        trail = visit.note
        assert isinstance(trail, Trail)
        mind.now = visit.now
        mind.trail = trail
        visit.note = None
        record = trail.record
        prompt = visit.prompt // visit.block_size
        reached = trail.found
        ghost = self._ghost(entry, trail.found)
        if ghost is not None and ghost.prompt > trail.found:
            reached = min(prompt, ghost.prompt)
            self._note_path(trail, ghost, reached - trail.found)
            if not trail.continues and _goes_on(ghost, reached):
                self._continue(trail, ghost)
            trail.previous = ghost
        record.time = visit.now
        record.prompt = prompt
        record.found = min(reached, prompt)
        mind.num_requests += 1
        self._judge(trail, entry.end if entry is not None else 0, prompt)
        record.answered = entry is not None and entry.end > prompt
        record.trimmed = record.answered and mind.trims and mind.num_requests % TRIAL > 0
        record.closed = True
        if prompt > 1:
            mind.doubt(record.kind)
            mind.model.watch(record, self._cells(trail, visit))

    def _continue(self, trail: Trail, previous: Record) -> None:
        """A request goes on from where the previous one ended."""
        mind = self._mind
        trail.continues = True
        trail.record.turn = previous.turn + 1
        previous.superseded = True
        mind.doubt(previous.kind)
        mind.model.returned(previous, mind.now)
        rest = trail.rest
        if (
            rest is not None
            and rest.note is previous
            and rest.evictable
            and rest.policy is not None
        ):
            rest.policy.exposed(rest)

    def _cells(self, trail: Trail, visit: Visit) -> tuple[int, ...]:
        """Return the values of a request's features, each its own number."""
        record = trail.record
        turn = (0, 1, 2, 3, 3)[record.turn] if record.turn < 5 else 4
        if not trail.continues and record.found and trail.fan_out < TRUNK:
            turn = 5
        new = bucket((record.prompt - record.found) * visit.block_size // 64, 15)
        return turn, 16 + new, 64 + 16 * turn + new, 256 + bucket(visit.output, 15)

    def _ghost(self, entry: Entry | None, found: int) -> Record | None:
        """Return, and forget, the record that had the first missing block of a request."""
        while entry is not None and entry.end - entry.num_blocks > found:
            entry = entry.above
        if entry is None or entry.end <= found:
            return None
        return self._mind.recall(entry.name(found - entry.end + entry.num_blocks))

    def _learn_of_answers(self, previous: Record, found: int) -> None:
        if previous.trimmed:
            return
        answers = self._mind.answers
        answers[0] += found > previous.prompt
        answers[1] += 1
        if answers[1] > TRUST:
            answers[0] /= 2
            answers[1] /= 2

    def _note_path(self, trail: Trail, ghost: Record, num_blocks: int) -> None:
        if trail.path and trail.path[0][0] is ghost:
            trail.path[0] = (ghost, trail.path[0][1] + num_blocks)
        else:
            trail.path.insert(0, (ghost, num_blocks))

    def _judge(self, trail: Trail, end: int, asked: int) -> None:
        """Find out what LRU would have found, and put the request on top of its stack."""
        mind, capacity = self._mind, self.capacity()
        lru_found = 0
        for owner, num_blocks in reversed(trail.path):
            room = capacity - mind.shadow.above(owner, capacity)
            lru_found += max(min(num_blocks, room), 0)
            if room < num_blocks:
                break
        for owner, num_blocks in trail.path:
            mind.shadow.take(owner, num_blocks)
        if trail.record.slot < 0 and end:
            mind.shadow.push(trail.record, end, capacity)
        mind.judge(trail.found, lru_found, asked)

    # -- entries ---------------------------------------------------------------------------

    def seam(self, entry: Entry) -> int:
        record = self._record(entry)
        return max(record.prompt - (entry.end - entry.num_blocks), 0) if record.trimmed else 0

    def added(self, entry: Entry) -> None:
        record = self._record(entry)
        entry.note = record
        beyond = record.trimmed and entry.end - entry.num_blocks >= record.prompt
        entry.queue = BEYOND if beyond else FIRST_CLASS

    def released(self, entry: Entry) -> None:
        entry.rank = (self.tick(),)
        self.returned(entry)

    def returned(self, entry: Entry) -> None:
        self._num_cached += 1
        if entry.evictable:
            self._push(entry)

    def referenced(self, entry: Entry) -> None:
        self._num_cached -= 1
        queue = self._front_of.get(id(entry))
        if queue is not None:
            self._doubt(queue - FIRST_CLASS)

    def exposed(self, entry: Entry) -> None:
        self._push(entry)

    def split(self, upper: Entry, lower: Entry) -> None:  # noqa: ARG002 - not a leaf: no candidate
        self._num_cached += 1

    def evicting(self, entry: Entry, num_blocks: int) -> None:
        record = entry.note
        if isinstance(record, Record) and not record.superseded and entry.queue != BEYOND:
            self._mind.remember(entry.name(entry.num_blocks - num_blocks), record)

    def victim(self) -> Entry | None:
        if self._mind.is_lru:
            heads = [self._head(queue) for queue in list(self._heaps)]
            return min((head for head in heads if head is not None), key=_age, default=None)
        self._look()
        for queue in (SUPERSEDED, BEYOND):
            head = self._head(queue)
            if head is not None:
                return head
        return min(self._fronts.values())[2] if self._fronts else None

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
        trail = self._mind.trail
        return trail.record if trail is not None else Record()

    def _queue(self, entry: Entry) -> int:
        record = self._record(entry)
        if record.superseded:
            return SUPERSEDED
        return entry.queue if entry.queue == BEYOND else FIRST_CLASS + record.kind

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
        if len(heap) > 2 * self._num_cached + 64:
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
        return entry.policy is self and entry.rank[0] == age and entry.evictable


def _goes_on(previous: Record, reached: int) -> bool:
    """Whether a request that shares so many blocks continues the previous one.

    It may leave out a tail of what was new in it: the end of a prompt is often written anew.
    """
    new = previous.prompt - previous.found
    fits = reached >= previous.found + (new + 1) // 2
    return fits and previous.closed and not previous.superseded and previous.prompt > 1


def _age(entry: Entry) -> float:
    return entry.rank[0]
