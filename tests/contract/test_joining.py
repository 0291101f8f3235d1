"""Runs that branches divided: one run again when the branches are gone and the run is used."""

from random import Random

import numpy as np
import pytest
from core_help import found, generate, prefill, run, serve
from hybrid_help import conserved, make, serve_in_pieces

from quire import ops
from quire.core import CacheManager, FullAttention, Hint
from quire.core.policies import policy_names
from quire.exchange import block_hashes, digests_of, hold
from quire.groups import Recurrent, SlidingWindow
from watching import take_evicted, watchers

FULL, STATE = FullAttention(), Recurrent()
OTHER = 10**6


def path_of(manager, tokens):
    """Return the nodes that a request for more than these tokens passes, once it has room."""
    seq = manager.open([*tokens, 2**31 - 1])
    manager.reserve(seq, 1)
    nodes = seq.node.path()
    manager.close(seq)
    return nodes


def branched(manager, prompt, size, order=None, *, computed=True):
    """Serve a prompt, one that leaves it after each of its blocks, and drop those again."""
    serve(manager, prompt)
    ends = list(range(size, len(prompt), size))
    branches = [[*prompt[:end].tolist(), OTHER + end, *[1] * size] for end in ends]
    for branch in branches:
        if computed:
            serve(manager, branch)
        else:
            manager.close(manager.open(branch))
    for at in order if order is not None else range(len(branches)) if computed else ():
        ops.invalidate(manager, branches[at])
    return branches


@pytest.mark.cases(2)
@pytest.mark.parametrize("order", ["head", "tail", "random", "none"])
@pytest.mark.parametrize("events", [False, True])
def test_a_prompt_that_was_branched_at_each_block_is_one_run_again(order, events):
    manager = CacheManager(9000, 4, watchers=watchers(events=events))
    prompt = run(0, 4 * 200)
    orders = {"head": range(199), "tail": range(198, -1, -1), "none": None}
    picked = orders.get(order, Random(1).sample(range(199), 199))
    branched(manager, prompt, 4, picked, computed=order != "none")
    assert len(path_of(manager, prompt)) >= 1
    (node,) = path_of(manager, prompt)
    assert node.num_blocks == 200
    assert found(manager, prompt) == 800
    assert digests_of(manager).of(node) == block_hashes(prompt, 4)
    assert conserved(manager)


@pytest.mark.parametrize("order", [range(149), range(148, -1, -1)])
def test_joined_runs_hold_at_most_max_joined_bytes(order, monkeypatch):
    monkeypatch.setattr("quire.core.joining.MAX_JOINED_BYTES", 256)
    manager = CacheManager(20_000, 4)
    prompt = run(0, 4 * 150)
    branches = branched(manager, prompt, 4, [])
    for at in order:
        ops.invalidate(manager, branches[at])
        path_of(manager, prompt)
    assert len(path_of(manager, prompt)) <= 1 + 2 * len(prompt) * 4 // 256
    assert conserved(manager)


def test_runs_of_a_prompt_that_is_always_in_use_are_joined():
    manager = CacheManager(9000, 4)
    prompt = run(0, 400)
    users = [prefill(manager, prompt)]
    branches = branched(manager, prompt, 4, [])
    for branch in branches:
        users.append(prefill(manager, [*prompt, 7]))
        manager.close(users.pop(0))
        ops.invalidate(manager, branch)
    assert len(path_of(manager, prompt)) == 1
    for seq in users:
        assert seq.tokens.tolist() == [*prompt.tolist(), 7]
    assert conserved(manager)


def test_a_join_stops_where_somebody_stands():
    manager = CacheManager(900, 4)
    prompt = run(0, 40)
    branched(manager, prompt, 4, [])
    stays = manager.open([*prompt[:12], OTHER])
    pin = ops.pin(manager, prompt[:20])
    hold_on = prefill(manager, prompt[:28])
    let_go = hold(manager, hold_on)
    manager.close(hold_on)
    for end in range(4, 40, 4):
        ops.invalidate(manager, [*prompt[:end].tolist(), OTHER + end, 1, 1, 1, 1])
    assert [node.end for node in path_of(manager, prompt)] == [3, 5, 7, 10]
    assert conserved(manager)
    manager.reserve(stays, 1)
    manager.commit(stays, [OTHER])
    assert stays.tokens.tolist() == [*prompt[:12].tolist(), OTHER]
    manager.close(stays)
    pin.close()
    let_go()
    assert len(path_of(manager, prompt)) == 1
    assert conserved(manager)


@pytest.mark.cases(2)
@pytest.mark.parametrize("policy", policy_names())
def test_most_of_a_branched_run_is_joined_under_every_policy(policy):
    manager = CacheManager(9000, 4, policy=policy, watchers=watchers())
    prompt = run(0, 4 * 128)
    branched(manager, prompt, 4)
    for _ in range(4):
        path_of(manager, prompt)
        assert conserved(manager)
    assert len(path_of(manager, prompt)) <= 16
    assert ops.reclaim(manager, 100) == 100
    assert conserved(manager)


def test_an_eviction_inside_a_joined_run_is_reported_as_without_joining():
    manager = CacheManager(400, 1, sub_block=False, watchers=watchers())
    prompt = run(0, 100)
    serve(manager, prompt)
    branches = [[*prompt[:end].tolist(), *range(OTHER + end, OTHER + end + 3)] for end in (20, 50)]
    for branch in branches:
        serve(manager, branch)
    assert ops.reclaim(manager, 103) == 103
    serve(manager, prompt)
    for branch in branches:
        serve(manager, branch)
    path_of(manager, prompt)
    assert ops.reclaim(manager, 6) == 6
    assert len(path_of(manager, prompt)) == 1

    def evicted(tokens):
        return sum(
            part.stop - part.start
            for part in ops.explain(manager, [*tokens, 7]).segments
            if part.why == "evicted"
        )

    assert [evicted(branch) for branch in branches] == [3, 3]
    ops.reclaim(manager, 60)
    assert [evicted(branch) for branch in branches] == [3, 13]
    assert evicted(prompt) == 60
    serve(manager, branches[1])
    assert [evicted(branch) for branch in branches] == [3, 0]
    assert evicted(prompt) == 50
    assert conserved(manager)


def test_runs_of_other_terms_or_outlook_stay_apart():
    now = 0.0
    manager = CacheManager(400, 4, clock=lambda: now)
    serve(manager, run(0, 16), priority=5)
    serve(manager, run(0, 40))
    ends = [node.end for node in path_of(manager, run(0, 40))]
    assert ends == [4, 10]
    serve(manager, run(1000, 16), retain_s=10.0)
    serve(manager, run(1000, 40))
    assert [node.end for node in path_of(manager, run(1000, 40))] == [4, 10]
    now = 20.0
    path_of(manager, run(1000, 40))
    assert len(path_of(manager, run(1000, 40))) == 1, "its retention is over"
    serve(manager, run(2000, 16))
    serve(manager, [*run(2000, 16), *run(2100, 16)], hint=Hint("never"))
    assert [node.end for node in path_of(manager, run(2000, 16))] == [4]
    assert conserved(manager)


def test_a_kept_window_keeps_its_end_and_a_lost_one_does_not():
    manager = make(("full", 400, FULL), ("sliding", 400, SlidingWindow(8)))
    prompt = run(0, 40)
    serve_in_pieces(manager, prompt[:16])
    serve_in_pieces(manager, prompt)
    serve_in_pieces(manager, [*prompt[:16], *run(5000, 8)])
    ops.invalidate(manager, [*prompt[:16], *run(5000, 8)])
    assert [node.end for node in path_of(manager, prompt)] == [4, 10]
    assert found(manager, prompt[:16]) == 16
    ops.reclaim(manager, 400, 1)
    serve_in_pieces(manager, [*prompt, 1])
    assert len(path_of(manager, prompt)) <= 2
    assert conserved(manager)


def test_snapshots_inside_a_joined_run_are_found_still():
    manager = make(("full", 400, FULL), ("states", 40, STATE))
    prompt = run(0, 40)
    serve_in_pieces(manager, prompt[:17])
    serve_in_pieces(manager, prompt)
    for start in (5000, 6000):
        serve_in_pieces(manager, [*prompt[:16], *run(start, 8)])
        ops.invalidate(manager, [*prompt[:16], *run(start, 8)])
    path_of(manager, prompt)
    assert found(manager, prompt[:16]) == 16
    assert conserved(manager)


@pytest.mark.cases(2)
@pytest.mark.parametrize("seed", range(4))
def test_a_joined_tree_answers_as_one_that_never_joins(seed, monkeypatch):
    """Under LRU no lookup and no eviction depends on whether runs are joined.

    Reasons may: of an evicted run that comes back with another end, the old end is forgotten.
    """
    random = Random(seed)
    prompts = [[]]
    for _ in range(150):
        before = random.choice(prompts)
        kept = before[: random.randint(0, len(before))]
        prompts.append([*kept, *(random.randrange(3) for _ in range(random.randint(1, 9)))][:24])
    told, reasons = [], []
    for joins in (True, False):
        if not joins:
            monkeypatch.setattr("quire.core.take.join_path", lambda *_: None)
        manager, said = CacheManager(40, 1, watchers=watchers(evictions=True, curve=True)), []
        for prompt in prompts[1:]:
            seq = prefill(manager, np.array(prompt, dtype=np.int32))
            generate(manager, seq, [1, 2])
            manager.close(seq)
            said.append((seq.num_cached, sorted(each.digest for each in take_evicted(manager))))
        told.append(said)
        reasons.append(manager.stats.missed["evicted"])
        assert conserved(manager)
    assert told[0] == told[1]
    assert 0.9 * reasons[1] <= reasons[0] <= 1.1 * reasons[1]
