"""The cache of vLLM: blocks by chained hashes, and a queue of free blocks that may still be found.

Read from `vllm/v1/core` 0.32 (`block_pool.py`, `kv_cache_manager.py`), for models with one group of full attention.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from quire.core.tokens import TOKEN_BYTES
from quire_sim.caches.asking import CacheHit
from quire_sim.caches.prompts import CachePrompt
from quire_sim.caches.tracking import TrackedCache

STEP_TOKENS = 2048
"""Tokens of a step (`--max-num-batched-tokens`): blocks are found once the step that computes them is planned."""


class _Block:
    __slots__ = ("digest", "number", "users")

    def __init__(self, number: int) -> None:
        self.number = number
        self.digest: bytes | None = None
        self.users = 0


class _Running:
    """A request: its blocks, the digests of its full ones, and how many of these are published."""

    __slots__ = ("blocks", "digests", "published")

    def __init__(self, blocks: list[_Block], digests: list[bytes], published: int) -> None:
        self.blocks = blocks
        self.digests = digests
        self.published = published


class BlockCache(TrackedCache):
    """Blocks of tokens, each found by the hash of all tokens up to its end.

    A block without users waits in a queue: full ones at its end, the tail of a request first; others in front. A new
    block is taken from the front, and cannot be found any more. A full block of a running request that another one
    has as well is kept twice. The last token of a prompt is always computed, and so is its block.
    """

    def __init__(
        self, num_blocks: int | None = None, block_size: int = 16, step_tokens: int = STEP_TOKENS
    ) -> None:
        super().__init__()
        self._size = block_size
        self._step = step_tokens
        self._limit = None if num_blocks is None else num_blocks - 1  # one is vLLM's null block
        self._made = 0
        self._free: OrderedDict[int, _Block] = OrderedDict()
        self._found: dict[bytes, dict[int, _Block]] = {}
        self._running: dict[int, _Running] = {}

    def start(self, number: int, prompt: CachePrompt, now: float) -> CacheHit | None:
        """Find blocks, take the others, and publish those of the first step."""
        digests = self._digests(prompt, b"", prompt.tokens.tobytes())
        hits = self._lookup(digests, (prompt.size - 1) // self._size)
        needed = -(-prompt.size // self._size) - len(hits)
        reused = sum(not block.users for block in hits)
        if self._limit is not None and needed + reused > self._room():
            if self._running:
                return None
            return self._hit(number, prompt, 0, self._size)  # larger than the pool
        for block in hits:
            if not block.users:
                del self._free[block.number]
            block.users += 1
        run = _Running(hits + self._take(needed), digests, len(hits))
        self._running[number] = run
        hit = len(hits) * self._size
        self._publish(run, (hit + self._step) // self._size)
        found = self._hit(number, prompt, hit, self._size)
        if prompt.size - hit <= self._step:
            self._computed(number)
        return found

    def computed(self, number: int, now: float) -> None:
        """Publish all blocks of a prompt."""
        self._computed(number)
        if (run := self._running.get(number)) is not None:
            self._publish(run, len(run.digests))

    def end(self, number: int, now: float) -> None:
        """Publish the blocks of an answer, and free all."""
        prompt, run = self._ended(number), self._running.pop(number, None)
        if run is None:
            return
        if len(prompt.output) > 1:
            whole = prompt.tokens.tobytes() + prompt.output[:-1].tobytes()
            num_blocks = -(-len(whole) // (self._size * TOKEN_BYTES))
            more = num_blocks - len(run.blocks)
            more = more if self._limit is None else min(more, self._room())
            run.blocks += self._take(more)
            run.digests = self._digests(prompt, b"", whole)[: len(run.blocks)]
            self._publish(run, len(run.digests))
        for block in run.blocks[::-1]:
            block.users -= 1
            if not block.users:
                self._free[block.number] = block
                if block.digest is None:
                    self._free.move_to_end(block.number, last=False)

    def _digests(self, prompt: CachePrompt, parent: bytes, key: bytes) -> list[bytes]:
        """Return the digests of full blocks; the first one depends on the model and the salt."""
        size = self._size * TOKEN_BYTES
        parent = parent or f"{prompt.model}\0{prompt.scope}".encode()
        found: list[bytes] = []
        for at in range(0, len(key) - size + 1, size):
            parent = blake2b(parent + key[at : at + size], digest_size=16).digest()
            found.append(parent)
        return found

    def _lookup(self, digests: list[bytes], most: int) -> list[_Block]:
        found: list[_Block] = []
        for digest in digests[:most]:
            blocks = self._found.get(digest)
            if blocks is None:
                break
            found.append(next(iter(blocks.values())))
        return found

    def _room(self) -> int:
        """Return the blocks without users; those that were never used count as well."""
        assert self._limit is not None
        return self._limit - self._made + len(self._free)

    def _take(self, count: int) -> list[_Block]:
        taken: list[_Block] = []
        for _ in range(count):
            front = next(iter(self._free.values()), None)
            is_new = self._limit is None or self._made < self._limit
            if front is not None and (front.digest is None or not is_new):
                del self._free[front.number]
                self._forget(front)
            else:
                self._made += 1
                front = _Block(self._made)
            front.users = 1
            taken.append(front)
        return taken

    def _forget(self, block: _Block) -> None:
        if block.digest is None:
            return
        blocks = self._found[block.digest]
        del blocks[block.number]
        if not blocks:
            del self._found[block.digest]
        block.digest = None

    def _publish(self, run: _Running, end: int) -> None:
        for place in range(run.published, min(end, len(run.digests))):
            block, digest = run.blocks[place], run.digests[place]
            block.digest = digest
            self._found.setdefault(digest, {})[block.number] = block
        run.published = max(run.published, min(end, len(run.digests)))
