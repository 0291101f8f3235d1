"""`TieredStore`: prefixes come back from tiers before a request opens, and blocks go down after it."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from quire.core import CacheManager, MediaItem, Scope
from quire.core import Sequence as Running
from quire.core.tokens import IntArray
from quire.engines.tiered.cost import PrefillCost
from quire.engines.tiered.naming import Naming
from quire.engines.tiered.offloading import PUT_OFF_SHARE, Offloading
from quire.engines.tiered.parts import BlockPart, Origin
from quire.engines.tiered.search import Groups, Search
from quire.errors import OutOfBlocks
from quire.exchange import (
    Residency,
    Spill,
    all_blocks,
    blocks_of,
    digests_of,
    required_blocks,
    residency,
    restore,
)
from quire.exchange.hashing import tenant_tag
from quire.exchange.spill import NamedBlock
from quire.tensors.model import ModelLayout
from quire.tensors.pool import KVPool, Pool
from quire.tensors.transfers import Transfers
from quire.tiers.base import Outcome
from quire.tiers.contents.batches import batches
from quire.tiers.stack.gate import Estimate
from quire.tiers.stack.placement import Bits
from quire.tiers.stack.prefetch import Prefetch
from quire.tiers.stack.stack import TierStack


@dataclass(frozen=True, slots=True)
class Onboarded:
    """The tokens that came back for one prompt.

    tokens   per tier, by name: those that a request finds now and would not have found before
    causes   why records that were found did not come, by the name of their `quire.tiers.Outcome`
    """

    tokens: dict[str, int] = field(default_factory=dict[str, int])
    causes: dict[str, int] = field(default_factory=dict[str, int])


NOTHING = Onboarded()


class Prompt(NamedTuple):
    """The text of a request, whose it is, and the media in it."""

    tokens: IntArray
    scope: Scope | None
    media: tuple[MediaItem, ...]


class TieredStore:
    """Tiers below the pools of one engine.

    manager, pools, layout   what an engine has: `pools[g]` and `layout.groups[g]` are `manager.pools[g]`'s
    stack                    the tiers; whoever made it closes it
    origin                   what the bytes are of
    cost                     what computing takes; the engine lets it observe its prefills
    transfers                how K and V get into pools: at once, unless an engine sets its own and waits for it

    No call raises because a tier fails: what does not come is computed. Bytes that a tier gives are verified
    before they get into a pool, and their key names model, layout, scope and every token.

    The engine takes planned copies and calls `onboard` before it opens a prompt, `offload` when a sequence's
    blocks are written and published, and `spill` after each call of the manager that may evict, before
    copies are done or anything is written. One thread uses it at a time, that of the manager.
    """

    def __init__(
        self,
        manager: CacheManager,
        pools: Sequence[Pool],
        layout: ModelLayout,
        stack: TierStack,
        origin: Origin,
    ) -> None:
        self.manager = manager
        self.digests = digests_of(manager)
        self._spill = manager.kernel.watchers.find(Spill)
        self.stack = stack
        key = stack.settings.key
        self.parts = [BlockPart(layout, group, origin, key) for group in range(len(pools))]
        self.namespaces = [part.namespace for part in self.parts]
        self._groups = Groups.of(manager, self.parts)
        written = () if stack.settings.read_only else stack.tiers
        self._naming = Naming(written, self.namespaces, stack.call_later, key)
        self.cost = PrefillCost()
        self.pools = pools
        self.transfers = Transfers()
        self._entering = Estimate(latency_s=0.2e-3, bandwidth=2e9)
        self._layers = [group.layers for group in layout.groups]
        writes = {each.write for each in map(stack.settings.of, stack.names) if not each.read_only}
        self._goes_down = bool(writes - {"back"})
        self._counts_uses = "second_use" in writes
        full = not manager.kernel.tree.sparse  # a window's blocks go though they are held
        self._in_background = full and all(
            part.codec.copies(pool) for part, pool in zip(self.parts, pools, strict=True)
        )
        self.offloading = Offloading(manager, stack)
        self._asks_others = not all(tier.in_memory or tier.answers_at_once for tier in stack.tiers)

    # -- up --------------------------------------------------------------------------------

    def onboard(
        self, tokens: IntArray, scope: Scope | None = None, media: Sequence[MediaItem] = ()
    ) -> Onboarded:
        """Onboard the missing blocks of a prompt, as far as it pays; at least one token is left.

        The next `open` finds it. Raises what `CacheManager.probe` raises.
        """
        prompt = Prompt(tokens, scope, tuple(media))
        search = self._search(prompt, for_gain=True)
        if search is None:
            return NOTHING
        self._count_use(search)
        end = search.worth(self.stack, self.cost, self._entering.seconds)
        return self._load(prompt, search, end) if end > search.here.accepted else NOTHING

    def prefetch(
        self, tokens: IntArray, scope: Scope | None = None, media: Sequence[MediaItem] = ()
    ) -> Prefetch | None:
        """Start to copy a waiting prompt's records into the fastest tier; None if it needs none."""
        search = self._search(Prompt(tokens, scope, tuple(media)))
        if search is None or search.end <= search.here.accepted:
            return None
        keys, _, sizes = search.lacking(search.end)
        return self.stack.prefetch(keys, sizes)

    def held(
        self, tokens: IntArray, scope: Scope | None = None, media: Sequence[MediaItem] = ()
    ) -> dict[str, int]:
        """Return the tokens of a prompt that each tier would add to those on the device, by name."""
        search = self._search(Prompt(tokens, scope, tuple(media)))
        return {} if search is None else search.by_tier(search.end, self.stack.names)

    # -- down ------------------------------------------------------------------------------

    def offload(self, seq: Running) -> int:
        """Hand down those published blocks of a sequence that the stack wants; return the records."""
        self.transfers.join()
        names = self._naming.of(self.manager, seq.node, seq.scope)
        return self._store_wanted(blocks_of(self.manager, seq), names)

    def offload_later(self, seq: Running) -> None:
        """Hand down as `offload` does, but in a background thread, where blocks only have to be copied.

        They stay where they are until `offloading` has settled, even when the sequence is closed; pools
        must not be resized before. To all who ask the stack it is as if they were stored already. Where
        there is no time for it, a sequence is passed over (`StackSettings.busy_share`).
        """
        if not self._in_background:
            self.offload(seq)
            return
        feeding = self.stack.feeding
        most_bytes = int(PUT_OFF_SHARE * sum(pool.num_bytes for pool in self.pools))
        if not self._goes_down or not feeding.has_room(most_bytes):
            return
        self.transfers.join()
        blocks = blocks_of(self.manager, seq)
        keys = self._keys(blocks)
        if self._counts_uses and not self.stack.wanted(keys).any():
            return
        # A head that another prompt brings down is looked at again then: that one may be passed over.
        new: list[int] = np.flatnonzero(~feeding.has(keys)).tolist()
        if new:
            names = self._naming.of(self.manager, seq.node, seq.scope)
            num_bytes = sum(self.parts[blocks[at].group].record_bytes for at in new)
            work = partial(self._store_wanted, blocks, names)
            job = feeding.begin([keys[at] for at in new], work, num_bytes)
            self.offloading.hold(seq, job)

    def offload_all(self) -> int:
        """Hand down all that is published and that the stack does not have; return the records.

        No faster than tiers write it, and for `close_timeout_s` at most.
        """
        self.transfers.join()
        until_s = time.monotonic() + self.stack.settings.close_timeout_s
        stored = 0
        for chunk in self.chunks(list(all_blocks(self.manager))):
            if not self.stack.drain(until_s - time.monotonic()):
                break
            stored += self._store_wanted(chunk, lambda: None)
            if self._spill is not None:
                stored += self._store(self._lacking(chunk))
        return stored

    def spill(self) -> None:
        """Hand down what has just made room, where the manager has a `Spill`."""
        evicted = self._spill.take() if self._spill is not None else []
        if evicted:
            self.transfers.join()
            self._store(self._lacking(sorted(evicted, key=lambda each: each.index)))

    def purge(self, tenant: Scope, timeout_s: float) -> None:
        """Drop what is on its way down of a tenant, and all that lies between pools and records."""
        self.transfers.join()
        self.stack.drop_fed(tenant, timeout_s)
        self.offloading.settle_for(0)
        self._naming.forget(tenant_tag(tenant))
        for part in self.parts:
            part.forget()

    # -- helpers ---------------------------------------------------------------------------

    def _count_use(self, search: Search) -> None:
        """Keep what is stored of a prompt from ageing, the head first; count it where that decides."""
        keys: list[bytes] = []
        for group in range(len(self.parts)):
            if self._counts_uses or group in self._groups.full:
                stop = len(search.here.digests) if self._counts_uses else search.end
                places = list(range(stop))
            else:
                places = required_blocks(self.manager, group, search.end)
            keys += search.keys(group, places)
        self.stack.count_use(keys)

    def _search(self, prompt: Prompt, *, for_gain: bool = False) -> Search | None:
        """Look for a prompt; `for_gain`, in tiers only whose answer can be expected to be worth its time."""
        limit = self._groups.most_blocks(prompt.tokens.size)
        if limit < 1:
            return None
        here, find = residency(self.manager, *prompt), self.stack.find
        if for_gain and self._asks_others:
            num_bytes = 0
            for part in self.parts:
                needed = required_blocks(self.manager, part.group, limit)
                num_bytes += part.record_bytes * sum(at >= here.matched for at in needed)
            saved_s = self._saved_s(prompt, here, limit)
            find = partial(find, saved_s=saved_s, num_bytes=num_bytes)
        return Search(self._groups, here, prompt.tokens.size, find)

    def _saved_s(self, prompt: Prompt, here: Residency, end: int) -> float:
        """Return the seconds of computing that having so many blocks of a prompt saves."""
        size = self.manager.block_size
        return self.cost.saved(here.accepted * size, end * size, prompt.tokens.size)

    def _load(self, prompt: Prompt, search: Search, end: int) -> Onboarded:
        asked_s = time.perf_counter()
        keys, levels, sizes = search.lacking(end)
        saved_s = self._saved_s(prompt, search.here, end)
        outcomes, buffers = self.stack.load(keys, sizes, found=levels, saved_s=saved_s)
        begun_s = time.perf_counter()
        causes = Counter(str(what) for what in outcomes if what is not Outcome.HIT)
        pairs = zip(keys, buffers, strict=True)
        came = {key: buffer for key, buffer in pairs if buffer is not None}
        for group, places in search.brought(end).items():
            for key in search.keys(group, places):
                if key in came and not self.parts[group].reads(came[key]):
                    del came[key]
                    causes[str(Outcome.FOREIGN)] += 1
        try:
            end = search.whole(end, came) if causes else end
            tokens = self._enter(prompt, search, end, came)
        except BaseException:
            self.transfers.join()  # blocks that have gone back are nobody's, but only for now
            raise
        finally:
            self.transfers.then(lambda: self.stack.give_back(buffers))
        if tokens:
            self._entering.observe(sum(sizes), time.perf_counter() - begun_s)
            earned_s = saved_s if saved_s < math.inf else 0.0
            self.stack.feeding.adjust_budget(earned_s - (time.perf_counter() - asked_s))
        return Onboarded(tokens, dict(sorted(causes.items())))

    def _enter(
        self, prompt: Prompt, search: Search, end: int, buffers: dict[bytes, memoryview]
    ) -> dict[str, int]:
        """Put verified records into blocks of the pools, and let requests find them."""
        if end <= search.here.accepted:
            return {}
        tokens, scope, media = prompt
        brought = search.brought(end)
        try:
            restored = restore(self.manager, tokens, end, brought, scope, media=media)
        except OutOfBlocks:
            return {}
        with restored:
            self.spill()
            for group, places in brought.items():
                if not places:
                    continue
                pool, blocks = self.pools[group], restored.blocks[group]
                pool.poison(blocks)
                records = [buffers[key] for key in search.keys(group, places)]
                step = self.parts[group].decoding(records, pool, blocks)
                if isinstance(pool, KVPool):
                    self.transfers.add(self._layers[group], step)
                else:
                    step(None)  # states are copied before anything computes
            restored.commit()
        return search.by_tier(end, self.stack.names)

    def _store(self, blocks: Sequence[NamedBlock], wanted: Bits | None = None) -> int:
        """Encode and hand down blocks, the head first, as far as they are taken; return the records.

        With what the stack wants of them, as a prompt's records; else as evicted blocks.
        """
        stored, done = 0, 0
        for chunk in self.chunks(blocks):
            keys, records = self._sealed(chunk)
            if wanted is None:
                outcomes = self.stack.store_evicted(keys, records)
            else:
                outcomes = self.stack.store(keys, records, wanted[done : done + len(chunk)])
            taken = sum(what in (Outcome.STORED, Outcome.PRESENT) for what in outcomes)
            stored += taken
            done += len(chunk)
            if not taken:
                break
        return stored

    def _store_wanted(self, blocks: Sequence[NamedBlock], names: Callable[[], None]) -> int:
        """Store those blocks of a prompt that the stack wants, and what they stand for; return the records."""
        wanted = self.stack.wanted(self._keys(blocks))
        chosen: list[int] = np.flatnonzero(wanted).tolist()
        if not chosen:
            return 0
        stored = self._store([blocks[at] for at in chosen], wanted[chosen])
        names()
        return stored

    def _lacking(self, blocks: Sequence[NamedBlock]) -> Sequence[NamedBlock]:
        """Return the blocks that the fastest tier does not have, as far as that is known at once."""
        if self.stack.is_closed:
            return []
        first = self.stack.tiers[0]
        if not first.in_memory:
            return blocks
        there = first.contains(self._keys(blocks))
        return [block for block, is_there in zip(blocks, there, strict=True) if not is_there]

    def _keys(self, blocks: Sequence[NamedBlock]) -> list[bytes]:
        return [self.parts[block.group].key(block.digest) for block in blocks]

    def chunks(self, blocks: Sequence[NamedBlock]) -> Iterator[Sequence[NamedBlock]]:
        """Return blocks in runs whose records are few and small enough to be in memory at once."""
        sizes = [self.parts[block.group].record_bytes for block in blocks]
        return batches(blocks, sizes)

    def encode(self, blocks: Sequence[NamedBlock]) -> tuple[list[bytes], list[memoryview]]:
        """Return keys and sealed records of blocks."""
        self.transfers.join()
        return self._sealed(blocks)

    def _sealed(self, blocks: Sequence[NamedBlock]) -> tuple[list[bytes], list[memoryview]]:
        """Do what `encode` does, on any thread: whoever has it done has joined `transfers`."""
        records = self.stack.records([self.parts[block.group].record_bytes for block in blocks])
        by_group: dict[int, list[int]] = {}
        for index, block in enumerate(blocks):
            by_group.setdefault(block.group, []).append(index)
        try:
            for group, indices in by_group.items():
                chosen = [blocks[index] for index in indices]
                out = [records[index] for index in indices]
                self.parts[group].encode(self.pools[group], chosen, out, self.stack.settings.key)
        except BaseException:
            self.stack.give_back(records)
            raise
        return self._keys(blocks), records
