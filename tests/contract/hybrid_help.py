"""Helpers of the contract tests of layer groups: managers, prefills, and a memory to read from."""

from core_help import generate, run

from quire import groups, ops
from quire.core import CacheManager, FullAttention, LayerGroup
from quire.groups import ChunkedAttention, Recurrent, SlidingWindow
from watching import watchers

BLOCK = 4
FULL = FullAttention()
SLIDING = SlidingWindow(8, interval=16)


def make(*groups, block_size=BLOCK, **options):
    """Return a manager of these (name, num_blocks, kind) groups."""
    layers = [LayerGroup(*group) for group in groups]
    options.setdefault("watchers", watchers())
    return CacheManager(groups=layers, block_size=block_size, **options)


def windowed(num_blocks, kind=SLIDING):
    """Return a manager of a full group that never runs short beside a windowed one."""
    groups = ("full", 512, FULL), ("sliding", num_blocks, kind)
    return make(*groups, sub_block=False)


def recurrent(num_states=8, interval=None):
    """Return a manager of a full group that never runs short beside a recurrent one."""
    return make(("full", 512, FULL), ("states", num_states, Recurrent(interval)))


def counts(manager, group):
    """Return free, active and cached blocks of a group."""
    pool = manager.pools[group]
    return pool.num_free, pool.num_active, pool.num_cached


def conserved(manager):
    """Whether every group accounts for all of its blocks; every invariant is recounted too."""
    ops.check(manager)
    return all(
        pool.num_free + pool.num_active + pool.num_cached == pool.num_blocks
        for pool in manager.pools
    )


def held(seq, group):
    """Return the indices of a sequence's blocks that its table still names."""
    return [i for i, block in enumerate(seq.block_ids(group).tolist()) if block >= 0]


def prefill_in_pieces(manager, tokens, piece=None, **options):
    """Compute a prompt in forwards that end at every stop, and after at most `piece` tokens."""
    seq = manager.open(tokens, **options)
    while seq.computed < len(tokens):
        end = min(seq.computed + (piece or len(tokens)), len(tokens))
        end = min([stop for stop in groups.stops(manager, seq) if stop > seq.computed] + [end])
        generate(manager, seq, tokens[seq.computed : end])
    manager.take_copies()
    return seq


def serve_in_pieces(manager, tokens, piece=None, **options):
    """Compute a prompt in pieces and close it."""
    manager.close(prefill_in_pieces(manager, tokens, piece, **options))


def squeeze(manager, start, num_blocks, block_size=BLOCK):
    """Take `num_blocks` blocks of every pool by one request that is computed at once, and close it."""
    seq = manager.open(run(start, num_blocks * block_size))
    generate(manager, seq, run(start, num_blocks * block_size))
    manager.take_copies()
    manager.close(seq)


def needed(kind, num_tokens):
    """Return the positions whose KV the token at `num_tokens` reads, by the kind's definition."""
    if isinstance(kind, FullAttention):
        return range(num_tokens)
    if isinstance(kind, SlidingWindow):
        sinks = range(min(kind.sinks, num_tokens))
        return sorted({*sinks, *range(max(0, num_tokens - kind.window), num_tokens)})
    if isinstance(kind, ChunkedAttention):
        return range(num_tokens // kind.chunk * kind.chunk, num_tokens)
    return range(0)


class Ledger:
    """The memory of a manager: which prefix every position of every block was computed for.

    `forward` writes through the sequence's own table, `copy` moves what was planned, `check`
    reads what the next token would read. A recurrent state is one value per block.
    """

    def __init__(self, manager):
        self.manager = manager
        self.kinds = [group.kind for group in manager.settings.groups]
        self.memory = [{} for _ in self.kinds]

    def copy(self):
        """Do the planned copies as one simultaneous assignment."""
        copies = self.manager.take_copies()
        size = self.manager.block_size
        for group, memory in enumerate(self.memory):
            mine = [copy for copy in copies if copy.group == group]
            contents = [
                [memory.get((copy.src, i)) for i in range(copy.num_tokens)] for copy in mine
            ]
            for copy, content in zip(mine, contents, strict=True):
                for i in range(size):
                    memory[copy.dst, i] = content[i] if i < len(content) else None
        return copies

    def write(self, seq, position, content):
        """Write the KV of one position in every group that keeps positions."""
        size = self.manager.block_size
        for group, kind in enumerate(self.kinds):
            if not isinstance(kind, Recurrent):
                block = int(seq.block_ids(group)[position // size])
                assert block >= 0, f"group {group} has no block for position {position}"
                self.memory[group][block, position % size] = content

    def forward(self, seq, token_ids):
        """Compute tokens: copies first, then KV and states."""
        self.copy()
        self.check(seq)
        before = tuple(seq.tokens.tolist())
        for i in range(len(token_ids)):
            self.write(seq, len(before) + i, (seq.scope, *before, *token_ids[: i + 1]))
        for group, kind in enumerate(self.kinds):
            if isinstance(kind, Recurrent):
                (block,) = seq.block_ids(group).tolist()
                self.memory[group][block, 0] = (seq.scope, *before, *token_ids)

    def generate(self, seq, token_ids):
        """Reserve, compute and commit."""
        token_ids = [int(token) for token in token_ids]
        self.manager.reserve(seq, len(token_ids))
        self.forward(seq, token_ids)
        self.manager.commit(seq, token_ids)

    def prefill(self, tokens, scope=None, **options):
        """Open a prompt and compute it, ending a forward at every stop."""
        seq = self.manager.open(tokens, scope, **options)
        self.copy()
        self.check(seq, working=False)
        while seq.computed < len(tokens):
            stops = [stop for stop in groups.stops(self.manager, seq) if stop > seq.computed]
            end = min([*stops, len(tokens)])
            self.generate(seq, tokens[seq.computed : end])
        return seq

    def check(self, seq, *, working=True):
        """Everything that the next token reads belongs to this very sequence."""
        tokens = tuple(seq.tokens.tolist())
        size = self.manager.block_size
        for group, kind in enumerate(self.kinds):
            table = seq.block_ids(group).tolist()
            if isinstance(kind, Recurrent):
                if tokens and working:
                    assert self.memory[group][table[0], 0] == (seq.scope, *tokens)
                continue
            for position in needed(kind, len(tokens)):
                block = table[position // size]
                assert block >= 0, f"group {group} dropped position {position}"
                content = self.memory[group].get((block, position % size))
                assert content == (seq.scope, *tokens[: position + 1])
