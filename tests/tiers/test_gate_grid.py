"""Never slower than the better of loading and computing: hits and misses over round trips, bandwidths and lengths.

In virtual time, so that whatever a request takes beyond what the tier and the device take is a decision's.
"""

from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import settings as runs
from hypothesis import strategies as st
from stack_help import Stacked

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import names_of, record_of

BLOCK = 16
MOST_TOKENS = 8192
NUM_PROMPTS = 24
WARM_UPS = 5

PROMPTS = [
    names_of(range(10_000 * number, 10_000 * number + MOST_TOKENS // BLOCK))
    for number in range(NUM_PROMPTS)
]
SIZE = len(record_of(PROMPTS[0][0], 0))
STEP_S = 0.005
"""So much of a load comes at a time."""


@cache
def record(key):
    return record_of(key, 0)


class Grid(Stacked):
    """A remote tier of a true round trip and bandwidth, before a device of a true speed.

    `block_s`  seconds of the tier's bandwidth for a block
    """

    def __init__(self, rtt_s, block_s, tokens_s, num_tokens, **settings):
        super().__init__("host", "remote", promote=False, **settings)
        self.rtt_s, self.block_s, self.tokens_s, self.num_tokens = (
            rtt_s,
            block_s,
            tokens_s,
            num_tokens,
        )
        remote = self.tiers[1]
        self.there = set()
        remote._contains = self._contains
        remote._get = self._get

    def _contains(self, keys, timeout_s):
        self.lanes.sleep(self.rtt_s)
        return [key in self.there for key in keys]

    def _get(self, keys, buffers, timeout_s, answers):
        self.lanes.sleep(self.rtt_s)
        owed_s = 0.0
        for index, key in enumerate(keys):
            owed_s += self.block_s
            if owed_s >= STEP_S or index + 1 == len(keys):
                self.lanes.sleep(owed_s)
                owed_s = 0.0
            buffers[index][:] = record(key)
            answers.settle(index, Outcome.HIT if key in self.there else Outcome.ABSENT)

    def compute_s(self, start, stop):
        """A forward has a cost of its own, and attention grows with what is before a token."""
        pairs = (stop - start) * (stop + start) / 2
        return (stop - start + pairs / 8192) / self.tokens_s + 0.002 if stop > start else 0.0

    def best_s(self, is_hit):
        """The better of computing and loading, as far as can be: two questions at most, and one load."""
        computing_s = self.compute_s(0, self.num_tokens)
        if not is_hit:
            return computing_s
        num_blocks = (self.num_tokens - 1) // BLOCK
        loading_s = (2 + (num_blocks > 64)) * self.rtt_s + num_blocks * self.block_s
        rest_s = self.compute_s(num_blocks * BLOCK, self.num_tokens)
        return min(computing_s, loading_s + rest_s)

    def request(self, prompt):
        """Serve one prompt as an engine does; return what that took."""
        num_tokens, stack = self.num_tokens, self.stack
        keys = PROMPTS[prompt][: (num_tokens - 1) // BLOCK]
        sizes = [SIZE] * len(keys)

        def recompute_s(count):
            return self.compute_s(count * BLOCK, num_tokens)

        def serve():
            saved_s = recompute_s(0) - recompute_s(len(keys))
            found = stack.find(keys, saved_s=saved_s, num_bytes=sum(sizes))
            chosen = stack.choose(keys, found, sizes, recompute_s)
            came = 0
            if chosen:
                saved_s = recompute_s(0) - recompute_s(chosen)
                outcomes, buffers = stack.load(
                    keys[:chosen], sizes[:chosen], found=found[:chosen], saved_s=saved_s
                )
                came = [*outcomes, "end"].index(
                    next((each for each in outcomes if each != "hit"), "end")
                )
                stack.give_back(buffers)
            self.lanes.sleep(recompute_s(came))

        return self.timed(serve)[1]

    def serve(self, prompts, is_hit):
        """Serve prompts; return the seconds that each took beyond what is allowed."""
        best_s = self.best_s(is_hit)
        allowed_s = max(1.1 * best_s, best_s + 0.002)
        return [self.request(prompt) - allowed_s for prompt in prompts]


GRID = {
    "rtt_s": st.sampled_from([0.0, 0.0001, 0.0005, 0.002, 0.008, 0.02, 0.05]) | st.floats(0, 0.05),
    "num_tokens": st.sampled_from([64, 256, 512, 1024, 8192]) | st.integers(64, MOST_TOKENS),
    "block_s": st.sampled_from([1e-5, 1e-4, 1e-3, 5e-3]),
    "tokens_s": st.sampled_from([500.0, 2e3, 7e3, 3e4, 1e5]),
}

SHARES = st.sampled_from([0.25, 0.5, 0.75])


def simulated(scenario, *grid):
    grid_of_gate = Grid(*grid)
    return grid_of_gate.run(lambda *_: scenario(grid_of_gate))


FEW, MANY = 6, 400
"""So many places of the grid are tried by default, and in the long run."""


def hits(*grid):
    def scenario(grid_of_gate):
        grid_of_gate.there.update(key for keys in PROMPTS for key in keys)
        grid_of_gate.serve(range(WARM_UPS), is_hit=True)
        return grid_of_gate.serve(range(WARM_UPS, NUM_PROMPTS), is_hit=True)

    return simulated(scenario, *grid)


def misses(*grid):
    def scenario(grid_of_gate):
        grid_of_gate.serve(range(WARM_UPS), is_hit=False)
        return grid_of_gate.serve(range(WARM_UPS, NUM_PROMPTS), is_hit=False)

    return simulated(scenario, *grid)


def mixed(share, *grid):
    def scenario(grid_of_gate):
        grid_of_gate.there.update(PROMPTS[0], PROMPTS[1])
        beyond_s, fresh, due = [], iter(range(2, NUM_PROMPTS)), 0.0
        for prompt in (0, 1, 0, 1, 0):
            grid_of_gate.serve([prompt], is_hit=True)
        for _ in range(WARM_UPS):
            grid_of_gate.serve([next(fresh)], is_hit=False)
        for turn in range(12):
            due += share
            if due >= 1:
                due -= 1
                beyond_s += grid_of_gate.serve([turn % 2], is_hit=True)
            else:
                beyond_s += grid_of_gate.serve([next(fresh)], is_hit=False)
        return beyond_s

    return simulated(scenario, *grid)


@pytest.mark.ci
@given(**GRID)
@runs(max_examples=FEW, deadline=None)
@example(rtt_s=0.008, num_tokens=1024, block_s=1e-4, tokens_s=7e3)
@example(rtt_s=0.002, num_tokens=512, block_s=1e-4, tokens_s=7e3)
@example(rtt_s=0.0001, num_tokens=256, block_s=1e-4, tokens_s=1e4)
def test_hits_are_never_slower_than_the_better_of_loading_and_computing(
    rtt_s, num_tokens, block_s, tokens_s
):
    assert max(hits(rtt_s, block_s, tokens_s, num_tokens)) <= 0


@given(**GRID)
@runs(max_examples=FEW, deadline=None)
def test_misses_are_never_slower_than_computing(rtt_s, num_tokens, block_s, tokens_s):
    assert max(misses(rtt_s, block_s, tokens_s, num_tokens)) <= 0


@given(**GRID, share=SHARES)
@runs(max_examples=FEW, deadline=None)
def test_hits_that_were_seen_and_new_prompts_are_told_apart(
    rtt_s, num_tokens, block_s, tokens_s, share
):
    assert max(mixed(share, rtt_s, block_s, tokens_s, num_tokens)) <= 0


@pytest.mark.long
@given(**GRID, share=SHARES)
@runs(max_examples=MANY, deadline=None)
def test_no_request_is_slower_than_allowed_at_drawn_points(
    rtt_s, num_tokens, block_s, tokens_s, share
):
    grid = rtt_s, block_s, tokens_s, num_tokens
    assert max(*hits(*grid), *misses(*grid), *mixed(share, *grid)) <= 0
