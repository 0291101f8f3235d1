"""Handles on blocks that stay open while other calls run: restores and holds."""

from dataclasses import dataclass

import numpy as np
from hybrid_requests import HybridRequests

from quire.core import FullAttention, block_hashes
from quire.errors import ConfigError, CopyError, OutOfBlocks, SequenceError
from quire.exchange import hold, required_blocks, residency, restore


@dataclass(eq=False)
class OpenRestore:
    """A restore that waits for its bytes: what was asked for, and the names of what belongs there."""

    restore: object
    tokens: list
    scope: object
    end: int
    brought: dict
    path: list


@dataclass(eq=False)
class OpenHold:
    """A hold: what gives it back, and what its blocks must hold until then."""

    release: object
    contents: list


class HybridHandles(HybridRequests):
    """Restores and holds, each with what it keeps in place while it is open."""

    def begin_restore(self, tokens, scope, num_blocks, extra):
        """Ask for what a hit of up to `num_blocks` lacks, and some more of what is not there."""
        size, manager = self.settings.block_size, self.manager
        path = self.names.path(scope, tokens)
        here = self.pure(residency, manager, [*tokens, 0], scope)
        end = min(num_blocks, len(tokens) // size)
        assert here.accepted <= here.matched <= len(tokens) // size
        assert here.digests[: len(tokens) // size] == block_hashes(tokens, size, scope)
        if self.copies_taken is False and manager.kernel.copies:
            self.take_copies()
        prompt = np.array(tokens, dtype=np.int32)
        if end <= here.accepted:
            if end:
                self.must_raise(ConfigError, restore, manager, prompt, end, {}, scope)
            return None
        brought = {}
        for group in self.groups:
            held = {at for at in range(min(here.matched, end)) if here.held[group][at]}
            wanted = set(required_blocks(manager, group, end))
            if group in self.settings.windowed:
                wanted |= {at for at in range(here.accepted, end) if extra >> at % 8 & 1}
            brought[group] = sorted(wanted - held)
        lacking = {g: places[:-1] for g, places in brought.items() if places}
        if any(set(required_blocks(manager, g, end)) & {brought[g][-1]} for g in lacking):
            self.must_raise(
                ConfigError, restore, manager, prompt, end, {**brought, **lacking}, scope
            )
        room = here.room
        restored = self.call(restore, manager, prompt, end, brought, scope, may_raise=OutOfBlocks)
        fits = all(len(places) <= room[g] for g, places in brought.items())
        fits = fits and all(room[g] for g in self.settings.recurrent)
        if isinstance(restored, OutOfBlocks):
            assert not fits or end < here.matched, "there was room to restore"
            return None
        restored.__enter__()
        handle = OpenRestore(restored, tokens[: end * size], scope, end, brought, path)
        self.restores.append(handle)
        assert self.pure(manager.probe, [*handle.tokens, 0], scope).num_blocks < end
        self.after()
        return handle

    def end_restore(self, handle, commit):
        """Write what was asked for to the blocks that were given, as they were named then."""
        size, restored, path, end = (
            self.settings.block_size,
            handle.restore,
            handle.path,
            handle.end,
        )
        for group, places in handle.brought.items():
            for at, block in zip(places, restored.blocks[group], strict=True):
                names = path[at * size : (at + 1) * size]
                names = names[-1:] if group in self.settings.recurrent else names
                assert len(self.memory[group].blocks[block]) == len(names)
                self.memory[group].blocks[block] = names
        if commit:
            self.call(restored.commit)
            self.manager.check()
            self.must_raise(SequenceError, restored.commit)
        restored.__exit__(None, None, None)
        self.restores.remove(handle)
        self.must_raise(SequenceError, restored.commit)
        if commit:
            self.intact = False  # shorter prefixes may have gaps
            self.published.add(self.names.root(handle.scope), path[: end * size])
            for group in self.settings.recurrent:
                self.snapshots[group].add(path[end * size - 1])
            hit = self.pure(self.manager.probe, [*handle.tokens, 0], handle.scope)
            assert hit.num_blocks == end, "what was restored is not found"
        self.after()

    def hold(self, live):
        """Keep what a sequence has published in place; in full groups every block of it."""
        size, published = self.settings.block_size, live.seq.published
        contents = [
            (group, block, live.path[at * size : (at + 1) * size])
            for group, kind in enumerate(self.settings.kinds)
            if isinstance(kind, FullAttention)
            for at, block in enumerate(live.seq.block_ids(group)[: published // size].tolist())
        ]
        release = self.call(hold, self.manager, live.seq)
        self.holds.append(OpenHold(release, contents))
        self.after()

    def let_go(self, hold):
        """Release a hold."""
        self.call(hold.release)
        self.holds.remove(hold)
        self.after()

    def check_holds(self):
        """What is held is where it was."""
        for held in self.holds if self.copies_taken else ():
            for group, block, names in held.contents:
                assert self.memory[group].blocks[block] == names, "a held block was moved"

    def refused_for_handles(self, function, *args):
        """Whether a call that moves blocks was refused for a handle that is open."""
        if self.restores or self.holds:
            self.must_raise(CopyError, function, *args)
        return bool(self.restores or self.holds)
