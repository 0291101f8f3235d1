"""Evicted prefixes are remembered for a while: a miss says how much of a prompt was evicted, to the block."""

import itertools

import numpy as np
import pytest
from core_help import generate, prefill, run, serve
from hypothesis import strategies as st

from quire import ops
from quire.core import CacheManager, Scope, Watcher
from quire.errors import OutOfBlocks, TruncateError
from quire.foresight import Trail
from quire.foresight import trail as lost
from quire.scope import NO_SCOPE
from turns import drawn

BLOCK = 4


@pytest.fixture
def manager():
    return CacheManager(100, BLOCK, sub_block=False, watchers=[Trail()])


def evicted(manager, tokens, scope=None):
    """The number of tokens of a prompt that are missed because they were evicted."""
    said = ops.explain(manager, [*tokens, 2**31 - 1], scope)
    return sum(part.stop - part.start for part in said.segments if part.why == "evicted")


def remembered(manager):
    """Runs and blocks that the trail has."""
    trail = manager.kernel.watchers.find(Trail)
    return trail._num_runs, trail._num_blocks


def forget_all(manager):
    ops.reclaim(manager, manager.num_cached)
    assert not manager.num_cached


def test_a_prompt_that_goes_on_differently_was_here_up_to_that_block(manager):
    serve(manager, run(0, 40))
    forget_all(manager)
    assert evicted(manager, run(0, 40)) == 40
    assert evicted(manager, run(0, 60)) == 40
    assert evicted(manager, run(0, 22)) == 20
    assert evicted(manager, [*run(0, 22), *run(1000, 18)]) == 20
    assert evicted(manager, [*run(0, 2), *run(1000, 38)]) == 0


def test_a_recomputed_prefix_leaves_no_memory_of_its_eviction(manager):
    serve(manager, run(0, 40))
    ops.reclaim(manager, 3)
    ops.reclaim(manager, 2)
    assert evicted(manager, run(0, 40)) == 20
    serve(manager, run(0, 40))
    assert evicted(manager, run(0, 40)) == 0
    assert remembered(manager) == (1, 10)


def test_prompts_below_a_shared_one_are_told_apart_when_all_is_gone(manager):
    shared = run(0, 20)
    lengths = {1000: 12, 2000: 24, 3000: 8}
    for own, length in lengths.items():
        serve(manager, [*shared, *run(own, length)])
    forget_all(manager)
    for own, length in lengths.items():
        assert evicted(manager, [*shared, *run(own, length), *run(9000, 8)]) == 20 + length
    assert evicted(manager, [*shared, *run(4000, 12)]) == 20


@pytest.mark.parametrize("chunk", [4, 8, 20, 1000])
def test_evictions_below_a_prefix_are_remembered_once_the_prefix_is_recomputed(manager, chunk):
    shared = run(0, 20)
    for own in (1000, 2000):
        serve(manager, [*shared, *run(own, 12)])
    forget_all(manager)
    tokens = [*shared, *run(3000, 8)]
    seq = manager.open(tokens)
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        manager.reserve(seq, len(part))
        manager.commit(seq, part)
        ops.check(manager)
    manager.close(seq)
    for own in (1000, 2000):
        assert evicted(manager, [*shared, *run(own, 12)]) == 12
    assert evicted(manager, [*shared, *run(4000, 12)]) == 0


def test_a_prompt_that_loses_its_end_bit_by_bit_is_one_run(manager):
    serve(manager, run(0, 40))
    for left in range(9, -1, -1):
        ops.reclaim(manager, 1)
        assert evicted(manager, run(0, 40)) == 40 - 4 * left
        ops.check(manager)
    assert remembered(manager) == (1, 10)


def test_a_recomputed_prefix_is_no_longer_reported_as_evicted(manager):
    serve(manager, run(0, 40))
    ops.reclaim(manager, 6)
    serve(manager, run(0, 40))
    assert evicted(manager, run(0, 40)) == 0
    ops.check(manager)


def test_evictions_are_remembered_per_scope(manager):
    serve(manager, run(0, 40))
    forget_all(manager)
    serve(manager, [7])
    assert evicted(manager, run(1000, 40)) == 0


@pytest.mark.parametrize("limit", ["MAX_RUNS", "MAX_BLOCKS"])
def test_the_oldest_evictions_are_forgotten_first(manager, monkeypatch, limit):
    monkeypatch.setattr(lost, limit, 3 * (2 if limit == "MAX_BLOCKS" else 1))
    for prompt in range(5):
        serve(manager, run(1000 * prompt, 8))
    forget_all(manager)
    assert [evicted(manager, run(1000 * prompt, 8)) for prompt in range(5)] == [0, 0, 8, 8, 8]


def test_a_recomputed_prefix_leaves_running_requests_alone(manager):
    shared = run(0, 20)
    for own in (1000, 2000):
        serve(manager, [*shared, *run(own, 12)])
    forget_all(manager)
    seqs = [prefill(manager, [*shared, *run(own, 8)]) for own in (3000, 4000)]
    for seq, own in zip(seqs, (3000, 4000), strict=True):
        assert seq.tokens.tolist() == [*shared, *run(own, 8)]
        manager.reserve(seq, 4)
        manager.commit(seq, run(own + 8, 4))
        ops.check(manager)
        manager.close(seq)
    assert evicted(manager, [*shared, *run(1000, 12)]) == 12


def test_others_are_told_while_a_prompt_comes_back_in_chunks_and_after_it_was_given_up(manager):
    serve(manager, run(0, 40))
    forget_all(manager)
    seq = manager.open(run(0, 40))
    manager.reserve(seq, 8)
    manager.commit(seq, run(0, 8))
    assert evicted(manager, run(0, 40)) == 32
    manager.close(seq)
    assert evicted(manager, run(0, 40)) == 32
    ops.check(manager)


def test_forks_go_on_with_what_was_lost_each_in_its_own_way(manager):
    prompt, one, other = (
        [*run(100, 8)],
        [1, 2, 3, 50, 4, 5, 6, 51],
        [11, 12, 13, 50, 14, 15, 16, 51],
    )
    serve(manager, [*prompt, *one, *[9] * 4])
    serve(manager, [*prompt, *one, *[8] * 4])
    forget_all(manager)
    seq = prefill(manager, prompt)
    twin = manager.fork(seq)
    generate(manager, seq, one)
    generate(manager, twin, other)
    assert evicted(manager, [*prompt, *other, *[8] * 4]) == 0
    for each in (seq, twin):
        generate(manager, each, [9] * 4)
        manager.close(each)
        ops.reclaim(manager, 1)
        ops.check(manager)


def test_truncated_tokens_do_not_lead_a_sequence_to_an_evicted_run():
    manager = CacheManager(100, 1, sub_block=False, watchers=[Trail()])
    for end in (7, 8):
        serve(manager, [1, 2, 3, 4, 5, 6, end])
    forget_all(manager)
    seq = prefill(manager, [1])
    generate(manager, seq, [2, 3])
    ops.truncate(manager, seq, 1)
    generate(manager, seq, [10, 11])
    generate(manager, seq, [4, 5, 6])
    assert evicted(manager, [1, 10, 11, 4, 5, 6, 7]) == 0


def test_a_path_that_goes_end_by_end_between_uses_is_counted_once():
    manager = CacheManager(402, 1, sub_block=False, watchers=[Trail()])
    serve(manager, run(0, 400))
    for left in range(400, 1, -1):
        manager.close(manager.open([*run(0, left), 2**31 - 1]))
        ops.reclaim(manager, 1)
    forget_all(manager)
    assert remembered(manager)[1] == 400


class Stored(Watcher):
    """The model: every path of blocks that was stored, less what its own sequence took back."""

    def begin(self, kernel):
        self.paths, self.tree = set(), kernel.tree

    def stored(self, seq, node, num_blocks):
        path = path_of(seq.scope, node)
        self.paths.update(path[:end] for end in range(1, len(path) + 1))

    def leaving(self, node, blocks, group, why):
        if why == "truncated":
            roots = self.tree.roots.items()
            (scope,) = [scope for scope, root in roots if root is node.holding(-1)]
            taken = path_of(scope, node)[: blocks.start + 2]
            self.paths = {path for path in self.paths if path[: len(taken)] != taken}


def path_of(scope, node):
    """The scope, and the blocks from its root to the end of a node."""
    size = len(node.name)
    key = b"".join(bytes(each.key) for each in node.path())
    return scope, *(key[at : at + size] for at in range(0, len(key), size))


ACTS = (
    "open",
    "open",
    "compute",
    "compute",
    "fork",
    "truncate",
    "pause",
    "close",
    "reclaim",
    "drop",
)


@pytest.mark.ci
@drawn(
    20,
    500,
    st.randoms(use_true_random=False),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(30, 90),
    st.sampled_from([None, 1, 2, 5, 20]),
    st.booleans(),
)
def test_the_trail_knows_of_each_block_whether_it_was_cached(
    random, block, num_blocks, max_runs, alike
):
    """Prompts that branch at every place, in blocks that may end alike, computed in part, by several at once, forked, taken back, paused."""
    with pytest.MonkeyPatch.context() as patch:
        if max_runs is not None:
            patch.setattr(lost, "MAX_RUNS", max_runs)
        fresh = (random.choice([1, 2]) for _ in itertools.count()) if alike else itertools.count(1)
        says_whether_it_was_here(random, block, num_blocks, fresh, knows_all=max_runs is None)


def says_whether_it_was_here(random, block, num_blocks, fresh, *, knows_all):
    model = Stored()
    manager = CacheManager(num_blocks, block, sub_block=False, watchers=[Trail(), model])
    prompts, running = [[0]], []

    def compute(seq, tokens):
        manager.reserve(seq, len(tokens))
        manager.take_copies()
        manager.commit(seq, tokens)

    for _ in range(80):
        act, scope = random.choice(ACTS), random.choice([NO_SCOPE, Scope(salt="other")])
        before = random.choice(prompts)
        kept = before[: random.randint(0, len(before))]
        prompt = [*kept, *itertools.islice(fresh, random.randint(1, 4 * block))][: 12 * block]
        asked = [*prompt, 2**31 - 1]
        size = len(asked) - 1 - (len(asked) - 1) % block
        key = np.array(asked[:size], np.int32).tobytes()
        path = scope, *(key[at : at + 4 * block] for at in range(0, len(key), 4 * block))
        cached = manager.probe(asked, scope).num_blocks
        was = max((end for end in range(len(path)) if path[: end + 1] in model.paths), default=0)
        said, true = evicted(manager, asked[:-1], scope), max(was - cached, 0) * block
        assert said == true if knows_all else said <= true
        seq = random.choice(running) if running else None
        try:
            if act == "open" and len(running) < 5:
                running.append(manager.open(prompt, scope))
                prompts.append(prompt)
            elif act == "reclaim":
                ops.reclaim(manager, random.randint(1, 8))
            elif act == "drop":
                ops.invalidate(manager, kept or None, scope)
            elif seq is None:
                continue
            elif seq.state == "suspended":
                manager.resume(seq)
            elif act == "compute":
                left = prompts_left(seq)
                length = random.randint(1, 3 * block)
                compute(seq, left[:length] or list(itertools.islice(fresh, length)))
                prompts.append(seq.tokens.tolist())
            elif act == "step":
                apart = [
                    each for each in running if each.state == "open" and not prompts_left(each)
                ]
                manager.reserve_step(apart)
                manager.take_copies()
                manager.commit_step(apart, list(itertools.islice(fresh, len(apart))))
            elif act == "fork" and len(running) < 5:
                running.append(manager.fork(seq))
            elif act == "truncate":
                ops.truncate(manager, seq, random.randint(0, seq.computed))
            elif act == "pause":
                manager.suspend(seq)
            elif act == "close":
                running.remove(seq)
                manager.close(seq)
        except (OutOfBlocks, TruncateError):
            pass
        ops.check(manager)


def prompts_left(seq):
    """The tokens that a sequence must compute next."""
    key = seq.script.key[(seq.computed - seq.script.start) * 4 :]
    return np.frombuffer(key, np.int32).tolist()
