"""The memory of layer groups of every kind, and what the next token may read of it.

Attention groups hold an identity (see model.py) at every position of every block. A recurrent
block holds one identity: that of the whole prefix whose state it is. What a kind needs at a
length, and which table entries it may leave out, is computed here from the kind's definition.
"""

from dataclasses import dataclass

from model import Memory

from quire.core import FullAttention
from quire.groups import ChunkedAttention, Recurrent, SlidingWindow


@dataclass(frozen=True)
class Settings:
    """One configuration of the manager under test: (kind, num_blocks) of each group."""

    groups: tuple
    block_size: int = 2
    policy: str = "lru"
    sub_block: bool = True
    events: bool = False
    debug: bool = False

    @property
    def kinds(self):
        return tuple(kind for kind, _ in self.groups)

    @property
    def recurrent(self):
        return tuple(i for i, kind in enumerate(self.kinds) if isinstance(kind, Recurrent))

    @property
    def attention(self):
        return tuple(i for i, kind in enumerate(self.kinds) if not isinstance(kind, Recurrent))

    @property
    def is_full(self):
        """Whether every group is of full attention: what is published is found, and in all of them."""
        return all(isinstance(kind, FullAttention) for kind in self.kinds)

    @property
    def windowed(self):
        kinds = (SlidingWindow, ChunkedAttention)
        return tuple(i for i, kind in enumerate(self.kinds) if isinstance(kind, kinds))


def window_start(kind, num_tokens):
    """Return the first position, sinks apart, that the token at `num_tokens` reads."""
    if isinstance(kind, SlidingWindow):
        return max(0, num_tokens - kind.window)
    if isinstance(kind, ChunkedAttention):
        return num_tokens // kind.chunk * kind.chunk
    return 0


def num_sinks(kind, num_tokens):
    """Return how many leading positions every token reads whatever the window is."""
    return min(kind.sinks, num_tokens) if isinstance(kind, SlidingWindow) else 0


def is_needed(kind, num_tokens, block, block_size):
    """Whether the token at `num_tokens` reads positions of a block, or writes behind them."""
    first = block * block_size
    in_window = first + block_size > window_start(kind, num_tokens)
    return in_window or first < num_sinks(kind, num_tokens)


def window_blocks(kind, block_size):
    """Return how many blocks a window that ends at a block boundary touches, sinks included."""
    if isinstance(kind, Recurrent):
        return 1
    span = kind.window if isinstance(kind, SlidingWindow) else kind.chunk
    sinks = kind.sinks if isinstance(kind, SlidingWindow) else 0
    return -(-span // block_size) + -(-sinks // block_size)


class AttentionMemory(Memory):
    """KV of one attention group; blocks may be added and taken away at the end."""

    def poison_from(self, block, offset):
        """Forget what stands in a block from `offset` on."""
        self.blocks[block][offset:] = [None] * (self.block_size - offset)

    def grow(self, num_blocks):
        """Have at least `num_blocks` blocks, new ones without content."""
        self.blocks += [[None] * self.block_size for _ in range(num_blocks - len(self.blocks))]

    def shrink(self, num_blocks):
        """Keep the first `num_blocks` blocks."""
        del self.blocks[num_blocks:]


class StateMemory(AttentionMemory):
    """States of one recurrent group: one identity per block."""

    def __init__(self, num_blocks, block_size):
        del block_size
        super().__init__(num_blocks, 1)

    def copy(self, copies):
        assert all(copy.num_tokens == 1 for copy in copies), "a state is copied as a whole"
        super().copy(copies)
