"""Handles on blocks that stay open while other calls run: restores and holds."""

from dataclasses import dataclass
from functools import partial

import numpy as np
from computing import Computing

from quire import ops
from quire.core import FullAttention
from quire.errors import ConfigError, CopyError, OutOfBlocks, SequenceError
from quire.exchange import block_hashes, hold, required_blocks, residency, restore


@dataclass(eq=False)
class OpenRestore:
    """A restore that waits for its bytes: what was asked for, and the names of what belongs there."""

    restore: object
    prompt: tuple
    end: int
    brought: dict
    path: list


@dataclass(eq=False)
class OpenHold:
    """A hold: what gives it back, and what its blocks must hold until then."""

    release: object
    contents: list


class Handles(Computing):
    """Restores and holds, each with what it keeps in place while it is open."""

    def begin_restore(self, prompt, num_blocks, extra):
        """Ask for what a hit of up to `num_blocks` lacks, and some more of what is not there."""
        size, manager = self.settings.block_size, self.manager
        tokens, scope, media = prompt
        path = self.names.path(scope, tokens, media)
        asked = [*tokens, 0], scope, media
        here = self.pure(residency, manager, *asked)
        end = min(num_blocks, len(tokens) // size)
        assert here.accepted <= here.matched <= len(tokens) // size
        assert here.digests[: len(tokens) // size] == block_hashes(tokens, size, scope, media)
        if not self.copies_taken:
            self.take_copies()
        array = np.array(tokens, dtype=np.int32)
        begin = partial(restore, manager, array, scope=scope, media=media)
        if end <= here.accepted:
            if end:
                self.must_raise(ConfigError, begin, end, {})
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
            self.must_raise(ConfigError, begin, end, {**brought, **lacking})
        room = here.room
        begun = self.call(begin, end, brought, may_raise=OutOfBlocks)
        fits = all(len(places) <= room[g] for g, places in brought.items())
        fits = fits and all(room[g] for g in self.settings.recurrent)
        if isinstance(begun, OutOfBlocks):
            assert not fits or end < here.matched, "there was room to restore"
            return None
        begun.__enter__()
        handle = OpenRestore(begun, asked, end, brought, path)
        self.restores.append(handle)
        assert self.pure(manager.probe, *asked).num_blocks < end
        self.after()
        return handle

    def end_restore(self, handle, commit):
        """Write what was asked for to the blocks that were given, as they were named then."""
        size, path, end, begun = self.settings.block_size, handle.path, handle.end, handle.restore
        for group, places in handle.brought.items():
            for at, block in zip(places, begun.blocks[group], strict=True):
                names = path[at * size : (at + 1) * size]
                names = names[-1:] if group in self.settings.recurrent else names
                assert len(self.memory[group].blocks[block]) == len(names)
                self.memory[group].blocks[block] = names
        if commit:
            self.call(begun.commit)
            ops.check(self.manager)
            self.must_raise(SequenceError, begun.commit)
        self.call(begun.__exit__, None, None, None)
        self.restores.remove(handle)
        self.must_raise(SequenceError, begun.commit)
        if commit:
            self.intact = self.intact and self.settings.is_full  # shorter prefixes may have gaps
            _, scope, _ = handle.prompt
            self.published.add(self.names.root(scope), path[: end * size])
            for group in self.settings.recurrent:
                self.snapshots[group].add(path[end * size - 1])
            hit = self.pure(self.manager.probe, *handle.prompt)
            assert hit.num_blocks >= end, "what was restored is not found"
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

    def refused_for_handles(self, function, *args):
        """Whether a call that moves blocks was refused for a handle that is open."""
        if self.restores or self.holds:
            self.must_raise(CopyError, function, *args)
        return bool(self.restores or self.holds)
