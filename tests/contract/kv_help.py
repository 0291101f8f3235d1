"""KV that tells which prefix it was computed for, and the smallest engine that computes it."""

import pytest

torch = pytest.importorskip("torch", reason="install it with: make setup")

from quire import KVLayout, KVPool  # noqa: E402
from quire.tensors import apply_plan, gather, scatter  # noqa: E402

torch.set_num_threads(1)

BLOCK = 4
LAYOUT = KVLayout(
    num_layers=3, kv_heads=2, k_width=4, v_width=3, dtype=torch.float32, block_size=BLOCK
)


def kv_of(tokens, start=0, layout=LAYOUT):
    """Return K and V per layer of the tokens from `start` on, as a model would compute them.

    Every number follows from all tokens up to its own, the layer, the head and the channel,
    and is a whole number that float32 holds exactly.
    """
    state, states = 0, []
    for token in tokens:
        state = (33 * state + int(token) + 1) % 65521
        states.append(state)
    prefix = torch.tensor(states[start:], dtype=torch.float32)[None, :, None]
    heads = torch.arange(layout.kv_heads)[:, None, None]

    def channels(width):
        return prefix * 128 + heads * 4 + torch.arange(width)

    return [
        (channels(layout.k_width) + 16 * layer, -channels(layout.v_width) - 16 * layer)
        for layer in range(layout.num_layers)
    ]


def same(one, other):
    """Whether K and V are equal in every layer, number by number."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)


class PoolEngine:
    """The smallest engine: a manager, its memory, and a model whose KV tells its prefix.

    Every layer group has a pool of its own. Fresh memory is NaN, so whoever reads what nobody
    computed is found out.
    """

    def __init__(self, manager, layout=LAYOUT):
        self.manager = manager
        self.layout = layout
        self.pools = [KVPool(layout, group.num_blocks, debug_nan=True) for group in manager.pools]
        self.pool = self.pools[0]

    def prefill(self, tokens, scope=None, **options):
        """Open a request and compute what of its prompt is not cached; return its sequence."""
        seq = self.manager.open(tokens, scope, **options)
        self.compute(seq, tokens[seq.num_cached :])
        return seq

    def compute(self, seq, token_ids):
        """Make room, do the planned copies, write the KV of the next tokens, commit them."""
        self.manager.reserve(seq, len(token_ids))
        self.copy()
        self.write(seq, token_ids)
        self.manager.commit(seq, token_ids)

    def write(self, seq, token_ids):
        """Write the KV of the next tokens through the sequence's own tables."""
        tokens = [*seq.tokens.tolist(), *(int(token) for token in token_ids)]
        new = kv_of(tokens, seq.computed, self.layout)
        for group, pool in enumerate(self.pools):
            scatter(pool, seq.block_ids(group), seq.computed, new)

    def copy(self):
        """Do the copies that the manager planned; return them."""
        copies = self.manager.take_copies()
        apply_plan(self.pools, copies)
        return copies

    def serve(self, tokens, scope=None, **options):
        """Compute a prompt and close it: its whole blocks stay cached."""
        self.manager.close(self.prefill(tokens, scope, **options))

    def reads_its_own(self, seq, group=0, window=None):
        """Whether every layer reads, through the table, the KV of this sequence's own tokens.

        With a window, the last so many tokens, and the rest of the block where they start.
        """
        first = max(seq.computed - (window or seq.computed), 0) // self.layout.block_size
        start = first * self.layout.block_size
        read = gather(self.pools[group], seq.block_ids(group)[first:], seq.computed - start)
        return same(read, kv_of(seq.tokens, start, self.layout))
