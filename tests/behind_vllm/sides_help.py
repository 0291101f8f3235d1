"""A small engine that uses blocks as vLLM does, for the two sides of the connector."""

import itertools
import time

import torch

from quire.engines.vllm.copying import WorkerSide
from quire.engines.vllm.parts import make_parts
from quire.engines.vllm.scheduling import SchedulerSide
from quire.scope import NO_SCOPE
from quire.tiers import StackSettings, TierStack

BLOCK = 4
HEADS = 4
ALL = StackSettings(busy_share=1.0, gate=False)
GROUPS = {
    "full": ((("a", "b"), 0, "plain"),),
    "hybrid": ((("a", "b"), 0, "plain"), (("c",), 7, "plain")),
}


class SmallEngine:
    """Workers that share the heads of each layer, and the scheduler's side; "KV" is a sum over the text so far."""

    def __init__(self, tiers, kind="full", num_workers=1, *, model="m", settings=ALL, **options):
        self.groups = GROUPS[kind]
        num_blocks = 64
        share = HEADS // num_workers
        names = [name for layers, _, _ in self.groups for name in layers]
        self.caches = [
            {name: torch.zeros(num_blocks, share, BLOCK, 6) for name in names}
            for _ in range(num_workers)
        ]
        self.workers = [
            WorkerSide(caches, self.groups, num_blocks, rank)
            for rank, caches in enumerate(self.caches)
        ]
        self.parts = make_parts([worker.shapes for worker in self.workers], model, BLOCK)
        self.stack = TierStack(tiers, settings)
        arena_bytes = options.pop("arena_bytes", 1 << 20)
        self.side = SchedulerSide(self.stack, self.parts, arena_bytes, num_workers, **options)
        self._free = iter(itertools.cycle(range(1, num_blocks)))
        self._numbers = itertools.count()

    def loaded(self, name, tokens):
        """Return what `matched` says when it has an answer."""
        until = time.monotonic() + 20
        while (num := self.side.matched(name, len(tokens), 0)) is None:
            assert time.monotonic() < until
            self.side.step({}, None, None)
            time.sleep(0.001)
        return num

    def run(self, tokens, scope=NO_SCOPE, media=(), name=None, *, took=lambda _: 0.0):
        """Serve one prompt in one step, whose tokens `took` so many seconds; return the tokens that were loaded and the blocks that it used."""
        name = name or f"r{next(self._numbers)}"
        self.side.follow(name, tokens, scope, media)
        num = self.loaded(name, tokens)
        blocks = [[next(self._free) for _ in range(-(-len(tokens) // BLOCK))] for _ in self.groups]
        for part, ids in zip(self.parts, blocks, strict=True):
            for at in range(min(part.needed(num // BLOCK).start, num // BLOCK)):
                ids[at] = 0  # behind the window, as vLLM has it
        self.side.allocated(name, blocks, num)
        copies = self.side.step(
            {name: (num, len(tokens) - num)}, lambda _: tokens, lambda _: blocks
        )
        for worker in self.workers:
            worker.begin()
            worker.load(copies)
        self.compute(tokens, num, blocks)
        for worker in self.workers:
            worker.save(copies)
            self.side.done(copies.step, 1, took(len(tokens) - num))
        self.side.ended(name)
        return num, blocks

    def compute(self, tokens, start, blocks):
        for at in range(start, len(tokens)):
            for rank, group, layer, cache in self._each():
                cache[blocks[group][at // BLOCK], :, at % BLOCK] = self._value(
                    tokens, at, rank, layer
                )

    def holds(self, tokens, blocks, end=None):
        """Assert that blocks hold what computing gives, as far as a request reads them."""
        end = (len(tokens) if end is None else end) // BLOCK * BLOCK
        for at in range(end):
            for rank, group, layer, cache in self._each():
                if at // BLOCK in self.parts[group].needed(end // BLOCK):
                    wanted = self._value(tokens, at, rank, layer)
                    assert torch.equal(cache[blocks[group][at // BLOCK], :, at % BLOCK], wanted), (
                        at,
                        layer,
                    )

    def settle(self):
        self.stack.drain(10)
        self.stack.flush()

    def close(self):
        self.settle()
        self.stack.check()
        self.side._arena.check()
        self.side.close()

    def _each(self):
        for rank, caches in enumerate(self.caches):
            for group, (names, _, _) in enumerate(self.groups):
                for name in names:
                    yield rank, group, name, caches[name]

    def _value(self, tokens, at, rank, layer):
        share = HEADS // len(self.workers)
        heads = torch.arange(rank * share, (rank + 1) * share)
        text = sum((place + 1) * token for place, token in enumerate(tokens[: at + 1]))
        return (text * 10 + ord(layer) + heads[:, None] * 1000 + torch.arange(6)).float()
