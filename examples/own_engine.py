"""An engine of your own around `CacheManager`: no torch, and a model that only counts.

The manager says which blocks hold which tokens; the engine computes and writes. Here K and V of
a token are its id and its position, so that the loop can show it reads what it should.

    python examples/own_engine.py
"""

import numpy as np

from quire import CacheManager, Sequence, ops

BLOCK_SIZE = 16
manager = CacheManager(num_blocks=256, block_size=BLOCK_SIZE)
memory = np.zeros((256, BLOCK_SIZE, 2), np.int64)  # [blocks, block_size, (K, V)]


def forward(seq: Sequence, tokens: list[int]) -> int:
    """Compute K and V of the next tokens, then "attend" to the whole sequence: the next token."""
    manager.reserve(seq, len(tokens))
    for copy in manager.take_copies():  # a shared block is copied before it is written
        memory[copy.dst, : copy.num_tokens] = memory[copy.src, : copy.num_tokens]
    blocks = seq.block_ids()
    for position, token in enumerate(tokens, start=seq.computed):
        memory[blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = token, position
    manager.commit(seq, tokens)  # now their K and V exist, and full blocks can be found
    seen = memory[blocks].reshape(-1, 2)[: seq.computed]
    assert (seen[:, 0] == seq.tokens).all()
    assert (seen[:, 1] == np.arange(seq.computed)).all()
    return int(seen.sum() % 50_000)


def generate(prompt: list[int], num_new: int) -> list[int]:
    """Answer one request: prefill what is not cached, decode, and leave all of it cached."""
    seq = manager.open(prompt)
    print(f"prompt of {len(prompt)}: {seq.num_cached} cached, {len(prompt) - seq.num_cached} to do")
    new = [forward(seq, prompt[seq.num_cached :])]
    while len(new) < num_new:
        new.append(forward(seq, new[-1:]))
    manager.close(seq)
    return new


system = [7 * n % 1000 for n in range(300)]
first = generate([*system, 1, 2, 3], 20)
generate([*system, 4, 5, 6], 20)  # shares the system prompt
generate([*system, 1, 2, 3, *first, 8, 9], 20)  # the next turn of the first conversation
ops.check(manager)
print(ops.dump(manager))
