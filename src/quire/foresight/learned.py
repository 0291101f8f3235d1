"""The policy of this project: evicts the blocks least likely to be used again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from quire.core.kernel import Kernel, Leaving, Watcher
from quire.core.node import Node
from quire.core.policy import Capacity, Policy, Tick
from quire.core.sequence import Sequence
from quire.core.stats import Missed
from quire.core.tokens import Key
from quire.foresight.learned_state import TRIAL, LearnedState, Walk
from quire.foresight.queues import Queues
from quire.foresight.reentry import EDGES, Record, SharedRoot, Stay, bucket
from quire.foresight.trail import Trail

MAX_DEPTH = 8
"""So many shared runs of a prompt are told apart."""

PAIR = 2
"""Of the features of a request, its turn and how much was new."""

TRUNK = 8
"""A run that so many branches continue is shared by all: leaving it says little."""


class Learned(Watcher):
    """Evicts the blocks that are least likely to save recomputation for the time they are held.

    Every request leaves a record at the end of its chain. Its class follows from how many turns
    came before, how much was new, and how long the answer was; how soon records of
    a class are come back to is learned while serving (`reentry`). What a later turn has
    gone on from is evicted first, then answers where they are never come back to (prompts often
    repeat them in other tokens), then the class and age of the lowest expected hits per
    block and second. A turn whose blocks were evicted is recognised by the last request that used them,
    which a `Trail` knows. A shadow of LRU on the same requests is the guard: where LRU would have found more,
    the policy is LRU. See docs/decisions/learned-policy.md for the study.

    It watches the requests of one manager, and makes a policy for each class of its nodes, which share a `mind`. Without a
    clock a request opened is a second. A fork leaves no record, a request that pauses one, at its end.
    """

    needs = (Trail,)

    def __init__(self, make_mind: Callable[[], LearnedState] = LearnedState) -> None:
        self._make_mind = make_mind
        self._tick: Tick | None = None

    def __call__(self, tick: Tick, capacity: Capacity) -> Policy:
        """Make the policy of a class; with the first of a manager all begins anew."""
        if tick is not self._tick:
            self._tick, self._capacity = tick, capacity
            self.mind = self._make_mind()
            self._walks: dict[int, Walk] = {}
        return self._queues(tick, capacity)

    def _queues(self, tick: Tick, capacity: Capacity) -> Policy:
        return Queues(tick, capacity, self.mind)

    def begin(self, kernel: Kernel) -> None:
        self._counters = kernel.counters
        self._clock = kernel.tree.order.now if kernel.tree.order.clock is not None else None

    def walk_of(self, seq: Sequence) -> Walk:
        """Return the `Walk` of an open request.

        The caller may correct its sizes where one token stands for more.
        """
        return self._walks[id(seq)]

    # -- requests --------------------------------------------------------------------------

    def opened(self, seq: Sequence, key: Key, missed: Missed) -> None:
        mind, node = self.mind, seq.node
        now = mind.now = self._clock() if self._clock is not None else float(seq.number - 1)
        mind.model.advance(now)
        mind.shared.advance(now)
        mind.forecasts.advance(now)
        if not node.end:
            mind.walk = Walk(Record())
        walk = self._walks[id(seq)] = mind.walk
        walk.record.number = seq.number
        walk.prompt, walk.block_size = seq.prompt_len, seq.rows.block_size
        walk.found = walk.reached = node.end
        walk.fan_out = len(node.children) if node.end else 0
        previous = walk.previous
        ghost = mind.ghosts.get(missed.last_user)
        before = previous if ghost is None else ghost
        if before is not None:
            num_lost = -(-missed.num_tokens // walk.block_size) if ghost is not None else 0
            self._share(walk, before, num_lost)
            mind.forecasts.found(before, walk.found + num_lost)
        if previous is not None and _goes_on(previous, walk.found):
            if previous.answered:
                mind.learn_of_answer(previous, walk.found)
            self._continue(walk, previous, node)
        if ghost is not None:
            # The end of a prompt is often written anew: what comes back at all is all taken to come back.
            lost = -(-missed.num_tokens // walk.block_size)
            prompt = min(walk.prompt // walk.block_size, ghost.prompt)
            walk.reached = max(prompt, walk.found + lost)
            walk.path.insert(0, (ghost, walk.reached - walk.found))
            if not walk.continues and _goes_on(ghost, walk.reached):
                self._continue(walk, ghost, node)

    def closed(self, seq: Sequence) -> None:
        walk = self._walks.pop(id(seq), None)
        if walk is None:
            return  # a fork
        mind, record = self.mind, walk.record
        mind.now = self._clock() if self._clock is not None else self._counters.num_requests
        self._leave(seq.node, record)
        prompt = walk.prompt // walk.block_size
        record.time = mind.now
        record.prompt = prompt
        record.found = min(walk.reached, prompt)
        mind.num_requests += 1
        walk.output = walk.output or max(seq.computed - seq.prompt_len, 0)
        cells = self._cells(walk)
        self._expect(seq, walk, cells[PAIR])
        self._judge(walk, seq.node.end, prompt)
        record.answered = seq.node.end > prompt
        record.trimmed = record.answered and mind.trims and mind.num_requests % TRIAL > 0
        record.closed = True
        self._watch_shared(record)
        if prompt > 1:
            mind.doubt(record)
            mind.model.watch(record, cells)

    def leaving(self, node: Node, blocks: range, group: int | None, why: Leaving) -> None:
        if group is not None or why != "evicted":
            return
        mind, record = self.mind, node.note
        mind.evicted += len(blocks)
        if record.superseded or not record.number or record.number in mind.ghosts:
            return
        is_answer = record.trimmed and blocks.start >= record.prompt
        if not is_answer:
            mind.remember(record)

    def _continue(self, walk: Walk, previous: Record, node: Node) -> None:
        """A request that found a path to this node goes on from where the previous one ended."""
        mind = self.mind
        walk.continues = True
        walk.record.turn = previous.turn + 1
        previous.superseded = True
        mind.doubt(previous)
        mind.model.returned(previous, mind.now)
        mind.forecasts.returned(previous, mind.now)
        while node.children and walk.found:
            node = node.children[next(reversed(node.children))]
        if node.note is previous:
            for expose in mind.exposures:
                expose(node)

    def _share(self, walk: Walk, before: Record, num_lost: int) -> None:
        """Find the shared runs that a prompt begins with: those of a request that it begins like, and what both have in common."""
        reached, now = walk.found + num_lost, self.mind.now
        run = before.shared
        while run is not None and run.end > reached:
            run = run.above
        if not _goes_on(before, reached) and reached > (run.end if run is not None else 0):
            depth = run.depth + 1 if run is not None else 1
            if depth <= MAX_DEPTH:
                run = SharedRoot(reached, run, depth, Stay(time=before.time))
        walk.record.shared = run
        while run is not None:
            self.mind.shared.returned(run.stay, now)
            run.uses += 1
            run.gap = now - run.stay.time
            run = run.above

    def _watch_shared(self, record: Record) -> None:
        """Begin to wait for the next use of the shared runs of a request."""
        mind, run = self.mind, record.shared
        while run is not None:
            mind.shared.forget(run.stay, mind.now)
            run.stay = Stay(time=mind.now)
            mind.shared.watch(run.stay, (bucket(run.uses, 15), 16 + bisect_right(EDGES, run.gap)))
            run = run.above

    def _expect(self, seq: Sequence, walk: Walk, kind: int) -> None:
        """Note the caller's forecast for the blocks that the request stored, and for those of earlier turns."""
        hint, record, previous = seq.terms.hint, walk.record, walk.previous
        record.since = 0 if walk.continues else walk.found
        record.foretold = hint.returns_in_s is not None
        record.spent = hint.reuse == "never"
        # Who spoke of times before and says no more than "never" comes back to nothing of it.
        speaks = walk.continues and previous is not None and previous.foretold
        record.finished = speaks and record.spent and not record.foretold
        self.mind.forecasts.expect(record, kind, seq.scope, hint, self.mind.now)

    def _leave(self, node: Node, record: Record) -> None:
        """Write a record on what its request stored, or alone has referenced since it began."""
        while node.parent is not None:
            owner = node.note
            if owner is None or (node.locks == 1 and not owner.closed):
                node.note = record
            node = node.parent

    def _cells(self, walk: Walk) -> tuple[int, ...]:
        """Return the values of a request's features, each its own number."""
        record = walk.record
        turn = (0, 1, 2, 3, 3)[record.turn] if record.turn < 5 else 4
        if not walk.continues and record.found and walk.fan_out < TRUNK:
            turn = 5
        new = bucket((record.prompt - record.found) * walk.block_size // 64, 15)
        return turn, 16 + new, 64 + 16 * turn + new, 256 + bucket(walk.output, 15)

    def _judge(self, walk: Walk, end: int, asked: int) -> None:
        """Compute the hit that LRU would have had, and put the request on top of its stack."""
        mind, capacity = self.mind, self._capacity()
        path, shadow = walk.path if len(walk.path) < 2 else _merged(walk.path), mind.shadow
        lru_found = 0
        for owner, num_blocks in reversed(path):
            room = capacity - shadow.above(owner, capacity)
            if room < num_blocks:
                lru_found += max(room, 0)
                break
            lru_found += num_blocks
        for owner, num_blocks in path:
            shadow.take(owner, num_blocks)
        if walk.record.slot < 0 and end:
            shadow.push(walk.record, end, capacity)
        mind.judge(walk.found, lru_found, asked, capacity)


def _merged(path: list[tuple[Record, int]]) -> list[tuple[Record, int]]:
    """Return a path with neighbours of one record as one."""
    merged: list[tuple[Record, int]] = []
    for owner, num_blocks in path:
        if merged and merged[-1][0] is owner:
            merged[-1] = (owner, merged[-1][1] + num_blocks)
        else:
            merged.append((owner, num_blocks))
    return merged


def _goes_on(previous: Record, reached: int) -> bool:
    """Whether a request that shares so many blocks continues the previous one.

    It may leave out a tail of what was new in it: the end of a prompt is often written anew. But where nothing of it was
    known, a part may be a system prompt that others use too: whose return is foretold is then continued by all but
    its last block.
    """
    if previous.foretold and not previous.found and reached < previous.prompt - 1:
        return False
    new = previous.prompt - previous.found
    if previous.spent and not previous.since:
        new = 0
    fits = reached >= previous.found + (new + 1) // 2
    return fits and previous.closed and not previous.superseded and previous.prompt > 1
