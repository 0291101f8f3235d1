"""Block ids as a file has them become dense, chained ids, numbered by first appearance."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

import numpy as np

from quire.errors import TraceError
from quire.sim.trace.rows import Runs

Ints: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
Bools: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool]]
Int32s: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int32]]

ROOT = 1
"""Stands for "nothing before it" where 0 stands for "unknown" and id i is i + 2."""

MAX_IDS = 2**31 - 3


class Chains:
    """Runs of ids of several requests: request i has runs `bounds[i]` to `bounds[i + 1]`.

    `first`, `end`: int64 [num_runs], half-open; `bounds`: int64 [num_requests + 1].
    """

    __slots__ = ("bounds", "end", "first")

    def __init__(self, first: Ints, end: Ints, bounds: Ints) -> None:
        self.first = first
        self.end = end
        self.bounds = bounds

    def heads(self) -> Ints:
        """Return which runs are the first of their request, int64 [requests that have any]."""
        starts = self.bounds[:-1]
        return starts[starts < self.bounds[1:]]

    def joined(self) -> Chains:
        """Return the same with neighbours that continue each other made one run."""
        begins = np.empty(len(self.first), bool)
        begins[1:] = self.first[1:] != self.end[:-1]
        begins[self.heads()] = True
        if begins.all():
            return self
        ends = np.empty(len(begins), bool)
        ends[:-1] = begins[1:]
        ends[-1:] = True
        number = np.concatenate(([0], begins.cumsum()))
        return Chains(self.first[begins], self.end[ends], number[self.bounds])

    def as_runs(self) -> Runs:
        """Return int32 [num_runs, 2]: (first id, length), not to be written to."""
        runs = np.empty((len(self.first), 2), np.int32)
        runs[:, 0] = self.first
        runs[:, 1] = self.end - self.first
        runs.flags.writeable = False
        return runs


def chains_of(ids: Ints, offsets: Ints) -> Chains:
    """Return ids one by one as runs; request i has ids `offsets[i]` to `offsets[i + 1]`."""
    begins = np.empty(len(ids), bool)
    begins[1:] = ids[1:] != ids[:-1] + 1
    starts = offsets[:-1]
    begins[starts[starts < offsets[1:]]] = True
    ends = np.empty(len(begins), bool)
    ends[:-1] = begins[1:]
    ends[-1:] = True
    number = np.concatenate(([0], begins.cumsum()))
    return Chains(ids[begins], ids[ends] + 1, number[offsets])


def ids_of(chains: Chains) -> tuple[Ints, Ints]:
    """Return the ids one by one, and at which of them each request begins."""
    lengths = chains.end - chains.first
    reach = np.concatenate(([0], lengths.cumsum()))
    ids = np.arange(reach[-1], dtype=np.int64) + np.repeat(chains.first - reach[:-1], lengths)
    return ids, reach[chains.bounds]


class Numbering:
    """What the ids of a file were renumbered to so far.

    Ids come in as *addresses*: small numbers from 0, not necessarily dense. While every address
    keeps one predecessor, equal addresses mean equal prefixes, and renumbering works on whole
    runs. From the first address on that follows two different ones, prefixes are told apart by
    a trie: the node of an address is found below the node of its predecessor.

    `num_ids`       ids given out: 0 to num_ids - 1
    `num_violations`  references so far to an id that follows another than at first
    """

    def __init__(self, source: str) -> None:
        self.num_ids = 0
        self.num_violations = 0
        self._source = source
        self._before = np.zeros(1 << 16, np.int32)  # by address: 0, ROOT or address + 2
        self._dense: Int32s | None = None  # by address: 0 or id + 1; None: every id is its address
        self._trie: dict[int, int] | None = None  # (parent id + 1) << 32 | address -> id

    def renumber(self, chains: Chains) -> Chains:
        """Return the same requests in dense ids. Raises `TraceError` for too many of them."""
        if not len(chains.first):
            return chains
        if self._trie is None:
            links = self._link(chains)
            if links is not None:
                return self._by_table(chains, links)
            self._trie = self._as_trie()
        return self._by_trie(chains, self._trie)

    def known(self) -> Ints:
        """Return the addresses seen so far, rising."""
        return np.flatnonzero(self._before)

    def room(self) -> int:
        """Return a bound of all addresses seen so far."""
        return len(self._before)

    def _link(self, chains: Chains) -> Ints | None:
        """Note which address follows which; return those inside runs, rising, each once.

        Where one follows another than before, nothing changes and None is returned.
        """
        first, end = chains.first, chains.end
        self._before = _grown(self._before, int(end.max()))
        inside = _union(first + 1, end)
        known_inside = self._before[inside]
        if not np.all((known_inside == 0) | (known_inside == inside + 1)):
            return None
        previous = _previous(chains)
        known_first = self._before[first]
        self._before[inside] = inside + 1
        then = self._before[first]
        self._before[first] = np.where(then == 0, previous, then)
        if np.array_equal(self._before[first], previous):
            return inside
        self._before[first] = known_first
        self._before[inside] = known_inside
        return None

    def _by_table(self, chains: Chains, inside: Ints) -> Chains:
        reach = np.maximum(np.maximum.accumulate(chains.end), self.num_ids)
        if self._dense is None:
            before = np.concatenate(([self.num_ids], reach[:-1]))
            if np.all(chains.first <= before):
                self.num_ids = int(reach[-1])
                return chains.joined()
            self._dense = np.zeros(len(self._before), np.int32)
            self._dense[: self.num_ids] = np.arange(1, self.num_ids + 1)
        self._dense = _grown(self._dense, len(self._before))
        self._number(chains, self._dense)
        return _mapped(chains, self._dense, inside)

    def _number(self, chains: Chains, dense: Int32s) -> None:
        """Give ids to what is new: a tail of each request, since prefixes come before."""
        some = chains.bounds[1:] > chains.bounds[:-1]
        lasts = chains.bounds[1:][some] - 1
        new = dense[chains.end[lasts] - 1] == 0
        first, end = chains.first.tolist(), chains.end.tolist()
        starts = chains.bounds[:-1][some][new].tolist()
        for start, last in zip(starts, lasts[new].tolist(), strict=True):
            run = last
            while run > start and not dense[first[run]]:
                run -= 1
            for k in range(run, last + 1):
                low, high = first[k], end[k]
                if k == run and dense[low]:
                    low += int(np.count_nonzero(dense[low:high]))
                stop = self.num_ids + high - low
                self._check_room(stop)
                dense[low:high] = np.arange(self.num_ids + 1, stop + 1)
                self.num_ids = stop

    def _as_trie(self) -> dict[int, int]:
        known = self.known()
        before = self._before[known].astype(np.int64)
        node = known if self._dense is None else self._dense[known].astype(np.int64) - 1
        parents = np.where(before == ROOT, ROOT + 1, before) - 2
        number = parents if self._dense is None else self._dense[parents].astype(np.int64) - 1
        keys = np.where(before == ROOT, 0, number + 1) << 32 | known
        self._dense = None
        return dict(zip(keys.tolist(), node.tolist(), strict=True))

    def _by_trie(self, chains: Chains, trie: dict[int, int]) -> Chains:
        self._count_violations(chains)
        addresses, offsets = ids_of(chains)
        nodes: list[int] = []
        find, append = trie.get, nodes.append
        every, bounds = addresses.tolist(), offsets.tolist()
        for begin, end in pairwise(bounds):
            parent = -1
            for address in every[begin:end]:
                key = parent + 1 << 32 | address
                node = find(key)
                if node is None:
                    node = trie[key] = len(trie)
                append(node)
                parent = node
        self.num_ids = len(trie)
        self._check_room(self.num_ids)
        return chains_of(np.array(nodes, np.int64), offsets)

    def _count_violations(self, chains: Chains) -> None:
        self._before = _grown(self._before, int(chains.end.max()))
        addresses, offsets = ids_of(chains)
        previous = np.empty(len(addresses), np.int64)
        previous[1:] = addresses[:-1] + 2
        starts = offsets[:-1]
        previous[starts[starts < offsets[1:]]] = ROOT
        new = self._before[addresses] == 0
        fresh, where = np.unique(addresses[new], return_index=True)
        self._before[fresh] = previous[new][where]
        self.num_violations += int(np.count_nonzero(self._before[addresses] != previous))

    def _check_room(self, num_ids: int) -> None:
        if num_ids > MAX_IDS:
            raise TraceError(
                f"{self._source}: more than {MAX_IDS:,} different blocks; cut the trace in parts"
            )


def _previous(chains: Chains) -> Ints:
    previous = np.empty(len(chains.first), np.int64)
    previous[1:] = chains.end[:-1] + 1  # the last id, end - 1, plus two
    previous[chains.heads()] = ROOT
    return previous


def _union(first: Ints, end: Ints) -> Ints:
    """Return the numbers in any of the half-open intervals, rising, each once."""
    order = np.argsort(first, kind="stable")
    first, end = first[order], end[order]
    keep = first < end
    first, end = first[keep], end[keep]
    if not len(first):
        return first
    reach = np.maximum.accumulate(end)
    begins = np.empty(len(first), bool)
    begins[0] = True
    begins[1:] = first[1:] > reach[:-1]
    starts = first[begins]
    lengths = reach[np.concatenate((np.flatnonzero(begins)[1:] - 1, [len(first) - 1]))] - starts
    offsets = np.concatenate(([0], lengths.cumsum()))
    return np.arange(offsets[-1], dtype=np.int64) + np.repeat(starts - offsets[:-1], lengths)


def _mapped(chains: Chains, dense: Int32s, inside: Ints) -> Chains:
    """Return runs of addresses as runs of ids, cut where the ids jump."""
    jumps = inside[dense[inside] != dense[inside - 1] + 1]
    low = jumps.searchsorted(chains.first, side="right")
    pieces = jumps.searchsorted(chains.end, side="left") - low + 1
    if len(jumps):
        reach = np.concatenate(([0], pieces.cumsum()))
        owner = np.repeat(np.arange(len(pieces)), pieces)
        nth = np.arange(reach[-1], dtype=np.int64) - reach[owner]
        first = np.where(nth == 0, chains.first[owner], jumps[low[owner] + nth - 1])
        last = nth == pieces[owner] - 1
        end = chains.end[owner]
        end[~last] = first[1:][~last[:-1]]
        chains = Chains(first, end, reach[chains.bounds])
    ids = dense[chains.first].astype(np.int64) - 1
    return Chains(ids, ids + chains.end - chains.first, chains.bounds).joined()


def _grown(table: Int32s, size: int) -> Int32s:
    """Return the table with room for `size` entries, the new ones 0 and not yet in memory."""
    if size <= len(table):
        return table
    larger = np.zeros(max(size, 2 * len(table)), np.int32)
    larger[: len(table)] = table
    return larger
