"""Watches over the context of an engine: rows by their text, cells, and logits by their request."""

from collections import Counter, defaultdict

import numpy as np

from quire.engines.loop.tiers import EngineTiers

_HEAD, _CELL = np.dtype("<u4"), np.dtype([("position", "<i4"), ("count", "<u4")])


class Rows:
    """Rows of K and V that were computed, by tenant and text; over all engines of a file, so over restarts."""

    def __init__(self):
        self._known = set()
        self.counts = Counter()

    def add(self, text, start, rows, scope):
        """Take note of rows that were computed for positions from `start` on."""
        self._known.update(self._named(text, start, rows, scope))
        self.counts["computed"] += len(rows)

    def check(self, what, text, start, rows, scope):
        """See that rows, saved or restored, are bit by bit those that were computed for this text and tenant."""
        for at, name in enumerate(self._named(text, start, rows, scope)):
            assert name in self._known, (
                f"{what}: the row of position {start + at} is of no such text"
            )
        self.counts[what] += len(rows)

    @staticmethod
    def _named(text, start, rows, scope):
        head = hash(scope)
        for token in text[:start]:
            head = hash((head, int(token)))
        for token, row in zip(text[start:], rows, strict=False):
            head = hash((head, int(token)))
            yield head, hash(row.tobytes())


class Watch:
    """Looks at each call of an engine's context, and at blocks that go down to tiers, which must have all their rows.

    `logits`: by request, rows of each text that was sampled from.
    """

    def __init__(self, engine, rows):
        self.engine, self.rows = engine, rows
        self.forward = engine._forward
        self.context = self.forward._context
        self.logits = defaultdict(lambda: defaultdict(list))
        self._texts, self._part, self._is_quiet = {}, None, False
        self._own_settled, self.forward._settled = self.forward._settled, self._settled
        self._own_logits, self.forward.logits = self.forward.logits, self._computed
        for name in ("decode", "save", "restore"):
            setattr(self, f"_own_{name}", getattr(self.context, name))
            setattr(self.context, name, getattr(self, f"_{name}"))
        self._lacking = []
        for each in engine._companions:
            if isinstance(each, EngineTiers):
                self._own_sealed, each.store._sealed = each.store._sealed, self._sealed

    def check(self):
        """See that each cell is of the sequences and the position that the pool believes, in each cache."""
        self.check_stored()
        residents = [*self.forward.residents.by_owner.values(), *self.forward.residents.idle]
        wanted = Counter(
            (number, at)
            for each in residents
            for number in each.ids
            for at in range(each.num_tokens)
        )
        for cells in cells_of(self.context):
            assert cells == wanted

    def check_stored(self):
        """See that all blocks that went down to tiers had all their rows."""
        assert not self._lacking, f"blocks went down without their rows: {self._lacking}"

    # -- calls of the engine ---------------------------------------------------------------

    def _settled(self, part, *more):
        self._part = part
        resident = self._own_settled(part, *more)
        text = part.job.known(0, part.start).tolist()
        assert resident.num_tokens == part.start
        if len(text) == part.start:
            self._texts[resident.ids[0]] = text, part.job.open_seq.scope
        else:  # behind guessed tokens, where a part was halved
            assert self._texts[resident.ids[0]][0][: len(text)] == text
        return resident

    def _computed(self, step, bound):
        found = self._own_logits(step, bound)
        ends = np.cumsum(step.lengths)
        for row, at in enumerate(step.logit_rows.tolist()):
            which = int(np.searchsorted(ends, at, side="right"))
            job, begin = step.jobs[which], int(ends[which] - step.lengths[which])
            own = step.tokens[begin : at + 1].tolist()
            text = job.known(0, int(step.starts[which])).tolist() + own
            if len(text) >= job.prompt_len:
                self.logits[job.request.request_id][tuple(text)].append(found[row].numpy())
        return found

    def _decode(self, chunks):
        found = self._own_decode(chunks)
        for each in chunks:
            text, scope = self._texts[each.ids[0]]
            assert len(text) == each.start
            text += each.tokens.tolist()
            for at in range(each.start, len(text), 256):
                stop = min(at + 256, len(text))
                for number in each.ids[-1:]:
                    self.rows.add(text, at, self._own_save_quietly(number, at, stop), scope)
        return found

    def _save(self, number, start, stop):
        found = self._own_save(number, start, stop)
        if not self._is_quiet:
            text, scope = self._texts[number]
            self.rows.check("saved", text, start, found, scope)
        return found

    def _restore(self, rows, ids, start):
        job = self._part.job
        text = job.known(0, start + len(rows)).tolist()
        self.rows.check("restored", text, start, rows, job.open_seq.scope)
        self._own_restore(rows, ids, start)
        assert np.array_equal(self._own_save_quietly(ids[0], start, start + len(rows)), rows)

    def _sealed(self, blocks):
        written, size = self.forward._pool.written, self.engine.manager.block_size
        self._lacking += [each for each in blocks if written[each.block] < size]
        return self._own_sealed(blocks)

    def _own_save_quietly(self, *given):
        self._is_quiet = True  # it calls itself for halves
        try:
            return self._own_save(*given)
        finally:
            self._is_quiet = False


def cells_of(context):
    """Counts of cells by sequence and position, of each cache, from the whole state of a context."""
    data, found = context.whole_state(), []
    at = 4 + int(np.frombuffer(data, _HEAD, 1)[0])
    for cache in context.layout._caches:
        streams, num = np.frombuffer(data, _HEAD, 2, at).tolist()
        assert streams == 1
        at, cells = at + 8, Counter()
        for _ in range(num):
            position, count = np.frombuffer(data, _CELL, 1, at)[0].tolist()
            ids = np.frombuffer(data, "<i4", count, at + 8).tolist()
            cells.update((number, position) for number in ids)
            at += 8 + 4 * count
        found.append(cells)
        if num:
            at += 16 + sum(12 + num * plane.row for plane in cache.planes)
    assert at == len(data)
    return found
