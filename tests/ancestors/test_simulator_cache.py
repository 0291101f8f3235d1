"""The cache manager of a serving simulator, feature by feature, in quire. It needs no tensors.

capacity     blocks from bytes and bytes per token
requests     all the blocks a request needs or none; freed on preemption and on completion
figures      utilisation; hits and misses on what the tokens are
simulation   all of it together: requests arrive, wait, run, are preempted, and finish
"""

from collections import deque

import numpy as np
import pytest
from ancestors_help import BLOCK, counts, run, torch

from quire import CacheManager, KVLayout
from quire.config import parse_bytes
from quire.errors import ConfigError, OutOfBlocks


@pytest.fixture
def manager():
    return CacheManager(num_blocks=16, block_size=BLOCK)


def start(manager, prompt):
    """Open a request and compute its prompt."""
    seq = manager.open(prompt)
    compute(manager, seq, prompt[seq.num_cached :])
    return seq


def compute(manager, seq, token_ids):
    """Reserve and commit tokens, if there are any; a simulator moves no bytes."""
    if not len(token_ids):
        return
    manager.reserve(seq, len(token_ids))
    manager.take_copies()
    manager.commit(seq, token_ids)


# -- capacity ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capacity", "num_blocks"), [("16GiB", 8192), ("2MiB", 1), ("3.9 MiB", 1), (5 << 21, 5)]
)
def test_capacity_follows_from_bytes_and_bytes_per_token(capacity, num_blocks):
    layout = KVLayout(32, 8, 128, 128, torch.bfloat16, block_size=16)
    assert layout.bytes_per_token == 131_072
    assert layout.num_blocks(parse_bytes(capacity)) == num_blocks
    manager = CacheManager(num_blocks, layout.block_size)
    assert manager.num_free * layout.bytes_per_block <= parse_bytes(capacity)


def test_a_capacity_below_one_block_is_refused():
    layout = KVLayout(32, 8, 128, 128, torch.bfloat16, block_size=16)
    with pytest.raises(ConfigError, match="one block of 16 tokens takes 2097152 bytes"):
        layout.num_blocks(parse_bytes("1MiB"))


# -- requests ------------------------------------------------------------------------------


def test_a_request_gets_all_its_blocks_or_none(manager):
    first = start(manager, run(0, 40))
    second = manager.open(run(1000, 32))
    with pytest.raises(OutOfBlocks, match="8 blocks of group 'full' needed; of its 16 blocks 6"):
        manager.reserve(second, 32)
    assert (second.num_blocks, counts(manager)) == (0, (6, 10, 0))
    manager.close(first)
    manager.reserve(second, 32)
    assert (second.num_blocks, counts(manager)) == (8, (0, 8, 8))


def test_a_batch_steps_together_or_not_at_all(manager):
    seqs = [start(manager, run(1000 * i, 28)) for i in range(2)]
    blocker = start(manager, run(5000, 4))
    batch = manager.batch(seqs)
    with pytest.raises(OutOfBlocks):
        manager.reserve_step(batch)
    assert [seq.capacity for seq in seqs] == [28, 28]
    manager.close(blocker)
    manager.reserve_step(batch)
    manager.commit_step(batch, [7, 8])
    assert [seq.computed for seq in seqs] == [29, 29]


def test_completion_frees_what_cannot_be_shared_and_keeps_the_rest_while_there_is_room(manager):
    seq = start(manager, run(0, 10))
    manager.close(seq)
    assert counts(manager) == (14, 0, 2)
    start(manager, run(1000, 60))
    assert counts(manager) == (0, 15, 1)
    assert manager.probe(run(0, 10)).num_tokens == 4


def test_preemption_frees_the_blocks_and_says_what_must_be_computed_again(manager):
    seq = start(manager, run(0, 10))
    compute(manager, seq, [70, 71, 72])
    manager.suspend(seq)
    assert counts(manager) == (13, 0, 3)
    other = start(manager, run(1000, 56))
    manager.close(other)
    assert manager.resume(seq) == 13 - 8
    assert seq.num_cached == 8
    compute(manager, seq, [8, 9, 70, 71, 72])
    assert seq.tokens.tolist() == [*range(10), 70, 71, 72]
    assert manager.stats.recomputed_tokens == 5


def test_a_preempted_request_that_lost_nothing_but_its_last_tokens_computes_only_these(manager):
    seq = start(manager, run(0, 10))
    manager.suspend(seq)
    assert manager.resume(seq) == 2


# -- figures -------------------------------------------------------------------------------


def test_utilisation_is_the_share_of_the_capacity_that_is_held(manager):
    shares = [manager.usage().utilisation]
    seq = start(manager, run(0, 14))
    shares.append(manager.usage().utilisation)
    other = start(manager, run(1000, 32))
    shares.append(manager.usage().utilisation)
    manager.close(seq)
    usage = manager.usage()
    shares.append(usage.utilisation)
    assert shares == [0, 4 / 16, 12 / 16, 11 / 16]
    assert usage.active / usage.num_blocks == 8 / 16  # without what is cached only
    assert (usage.used_tokens, usage.room_tokens) == (32, 32)
    manager.close(other)


def test_hits_and_misses_depend_on_what_the_tokens_are(manager):
    for prompt in (run(0, 13), run(0, 13), run(1000, 13), [*run(0, 8).tolist(), *run(2000, 5)]):
        manager.close(start(manager, prompt))
    stats = manager.stats
    assert (stats.prompt_tokens, stats.hit_tokens) == (4 * 13, 12 + 8)
    assert stats.missed_tokens == sum(stats.missed.values()) == 4 * 13 - 20
    assert stats.hit_rate == pytest.approx(20 / 52)
    assert (stats.missed["last_token"], stats.missed["cold"]) == (4, 12 + 12 + 4)


def test_a_miss_of_what_was_there_before_is_told_from_one_that_never_was(manager):
    manager.close(start(manager, run(0, 33)))
    manager.close(start(manager, run(1000, 64)))
    manager.close(start(manager, run(0, 33)))
    assert manager.stats.missed["evicted"] == 32


# -- simulation ----------------------------------------------------------------------------


class Simulator:
    """Continuous batching, first come first served; the youngest request is preempted."""

    def __init__(self, manager, requests):
        self.manager = manager
        self.waiting = deque((prompt, num_new, None) for prompt, num_new in requests)
        self.running = []
        self.texts = []
        self.preemptions = 0
        self.peak = 0.0

    def step(self):
        self._admit()
        self._decode()
        usage = self.manager.usage()
        self.peak = max(self.peak, usage.active / usage.num_blocks)
        counts(self.manager)

    def _admit(self):
        while self.waiting:
            prompt, end, seq = self.waiting.popleft()
            if seq is None:
                seq, end = self.manager.open(prompt), len(prompt) + end
                tokens = prompt
            else:
                tokens = seq.tokens.tolist()
                self.manager.resume(seq)
            try:
                compute(self.manager, seq, list(tokens)[seq.computed :])
            except OutOfBlocks:
                self.manager.suspend(seq)
                self.waiting.appendleft((prompt, end, seq))
                return
            self.running.append((prompt, end, seq))

    def _decode(self):
        while self.running:
            seqs = [seq for _, _, seq in self.running]
            batch = self.manager.batch(seqs)
            try:
                self.manager.reserve_step(batch)
            except OutOfBlocks:
                self._preempt()
                continue
            self.manager.take_copies()
            self.manager.commit_step(batch, [next_token(seq.tokens) for seq in seqs])
            break
        for entry in [entry for entry in self.running if entry[2].computed == entry[1]]:
            self.running.remove(entry)
            self.texts.append(entry[2].tokens.tolist())
            self.manager.close(entry[2])

    def _preempt(self):
        prompt, end, seq = self.running.pop()
        self.manager.suspend(seq)
        self.waiting.appendleft((prompt, end, seq))
        self.preemptions += 1


def next_token(tokens):
    return (int(tokens.sum()) * 31 + len(tokens)) % 1000


def served_alone(prompt, num_new):
    """Return the text of a request that never waits."""
    tokens = np.array(prompt)
    for _ in range(num_new):
        tokens = np.append(tokens, next_token(tokens))
    return tokens.tolist()


def test_a_simulation_serves_every_request_through_preemption_and_accounts_for_every_token():
    system = run(50_000, 12).tolist()
    requests = [
        ([*system, *run(1000 * i, 3 + 5 * i % 11).tolist()], 8 + 7 * i % 13) for i in range(20)
    ]

    def simulate():
        simulator = Simulator(CacheManager(num_blocks=24, block_size=BLOCK), requests)
        for _ in range(300):
            simulator.step()
        return simulator

    simulator = simulate()
    manager, stats = simulator.manager, simulator.manager.stats
    assert sorted(simulator.texts) == sorted(served_alone(*request) for request in requests)
    assert simulator.preemptions > 3
    assert 0.8 < simulator.peak <= 1
    assert stats.num_requests == 20
    assert stats.hit_tokens >= 19 * len(system)
    all_tokens = sum(len(prompt) + num_new for prompt, num_new in requests)
    assert stats.computed_tokens == all_tokens - stats.hit_tokens + stats.recomputed_tokens
    assert counts(manager)[1] == 0
    assert simulate().manager.snapshot() == manager.snapshot()
