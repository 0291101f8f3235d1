"""Continuous batching over one manager: requests arrive, wait, run, are preempted, and finish."""

from collections import deque

import numpy as np
from core_help import generate, run

from quire import CacheManager, ops
from quire.errors import OutOfBlocks

REQUESTS = [
    ([*run(50_000, 12).tolist(), *run(1000 * i, 3 + 5 * i % 11).tolist()], 8 + 7 * i % 13)
    for i in range(20)
]


class ServingLoop:
    """First come first served; the youngest request is preempted."""

    def __init__(self, manager, requests):
        self.manager = manager
        self.waiting = deque((prompt, num_new, None) for prompt, num_new in requests)
        self.running = []
        self.texts = []
        self.preemptions = 0

    def step(self):
        self.admit()
        self.decode()
        ops.check(self.manager)

    def admit(self):
        while self.waiting:
            prompt, end, seq = self.waiting.popleft()
            if seq is None:
                seq, end, tokens = self.manager.open(prompt), len(prompt) + end, prompt
            else:
                tokens = seq.tokens.tolist()
                self.manager.resume(seq)
            try:
                if rest := tokens[seq.computed :]:
                    generate(self.manager, seq, rest)
            except OutOfBlocks:
                self.manager.suspend(seq)
                self.waiting.appendleft((prompt, end, seq))
                return
            self.running.append((prompt, end, seq))

    def decode(self):
        while self.running:
            seqs = [seq for _, _, seq in self.running]
            batch = self.manager.batch(seqs)
            try:
                self.manager.reserve_step(batch)
            except OutOfBlocks:
                self.preempt()
                continue
            self.manager.take_copies()
            self.manager.commit_step(batch, [next_token(seq.tokens) for seq in seqs])
            break
        for entry in [entry for entry in self.running if entry[2].computed == entry[1]]:
            self.running.remove(entry)
            self.texts.append(entry[2].tokens.tolist())
            self.manager.close(entry[2])

    def preempt(self):
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


def served():
    loop = ServingLoop(CacheManager(num_blocks=24, block_size=4), REQUESTS)
    while loop.waiting or loop.running:
        loop.step()
    return loop


def test_every_request_is_served_through_preemption_and_every_token_accounted_for():
    loop = served()
    stats = loop.manager.stats
    assert sorted(loop.texts) == sorted(served_alone(*request) for request in REQUESTS)
    assert loop.preemptions > 3
    assert stats.num_requests == 20
    assert stats.hit_tokens >= 19 * 12
    all_tokens = sum(len(prompt) + num_new for prompt, num_new in REQUESTS)
    assert stats.computed_tokens == all_tokens - stats.hit_tokens + stats.recomputed_tokens
    assert loop.manager.num_active == 0


def test_the_same_requests_leave_the_same_state():
    assert ops.snapshot(served().manager) == ops.snapshot(served().manager)
