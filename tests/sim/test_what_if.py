"""The live curve: close to the exact one, small, and without influence on the cache."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_help import ListTrace

from quire import ops
from quire.core import CacheManager, LayerGroup, Scope
from quire.errors import ConfigError
from quire.exchange import residency, restore
from quire.foresight import LiveCurve, WhatIf
from quire.groups import SlidingWindow
from quire_sim.curves import curves
from quire_sim.trace import open_trace
from quire_sim.trace.rows import TraceRequest, compress
from quire_sim.workload import Agent, Traffic, Workload, parts_named
from traces import AGENT, CODING_AGENT, CONVERSATION, whole_path
from turns import drawn, few
from watching import watcher, watchers, what_if

SHARES = (0.01, 0.05, 0.10, 0.25, 0.50, 1.0)
TIMES = (0.25, 0.5, 1, 2, 4)
LAST = np.array([2**31 - 1], np.int32)
BLOCK = 16


def sampled(first, *others):
    """Return the first value of a parameter, and the others for the long run."""
    return [first, *(pytest.param(other, marks=pytest.mark.long) for other in others)]


def serve(manager, tokens, scope=None):
    seq = manager.open(tokens, scope)
    found = seq.computed
    manager.reserve(seq, len(tokens) - found)
    manager.take_copies()
    manager.commit(seq, tokens[found:])
    manager.close(seq)


def talks(seed, num_talks=300, num_turns=6, shared=40, block=BLOCK):
    """Turns of conversations with one system prompt, interleaved: prompts, in blocks by name."""
    random = Random(seed)
    texts = [[0, *range(1, shared)] for _ in range(num_talks)]
    names, prompts, open_talks, started = shared, [], [], 0
    while started < num_talks or open_talks:
        if started < num_talks and (len(open_talks) < 20 or random.random() < 0.2):
            open_talks.append((started, random.randint(1, num_turns)))
            started += 1
        at = random.randrange(len(open_talks))
        talk, turns = open_talks.pop(at)
        more = random.randint(3, 30)
        texts[talk] = [*texts[talk], *range(names, names + more)]
        names += more
        prompts.append(np.array(texts[talk], np.int32))
        if turns > 1:
            open_talks.append((talk, turns - 1))
    return prompts, names


def tokens_of(blocks, block=BLOCK):
    """The tokens of named blocks, and one more, which is never found."""
    inside = np.arange(block, dtype=np.int64)
    tokens = (blocks[:, None].astype(np.int64) * block + inside) % (2**31 - 2)
    return np.concatenate((tokens.ravel().astype(np.int32), LAST))


def exact_curve(prompts, block=BLOCK, **options):
    """The curve of the same prompts as a trace; ids are dense already."""
    rows = [
        TraceRequest(i, float(i), len(blocks) * block + 1, 0, compress(blocks))
        for i, blocks in enumerate(prompts, 1)
    ]
    return curves(ListTrace(rows, block), **options).lru


def served(prompts, capacity, block=BLOCK, **options):
    manager = CacheManager(
        capacity + 2, block, sub_block=False, watchers=watchers(curve=True), **options
    )
    for blocks in prompts:
        serve(manager, tokens_of(blocks, block))
    return manager


@pytest.mark.cases(1)
@pytest.mark.parametrize("share", sampled(0.1, 0.05, 0.25))
@pytest.mark.parametrize("block", [1, 16])
def test_the_curve_is_close_to_the_exact_one_whatever_the_pool_holds(share, block):
    prompts, names = talks(1)
    capacity = int(names * share)
    curve = what_if(served(prompts, capacity, block))
    exact = exact_curve(prompts, block)
    for other in [int(names * other) for other in SHARES] + [int(capacity * by) for by in TIMES]:
        assert curve.at(other) == pytest.approx(exact.at(other), abs=0.002)


@pytest.mark.parametrize("share", sampled(0.05, 0.01, 0.25))
@pytest.mark.parametrize("name", few([AGENT, CONVERSATION, CODING_AGENT], AGENT))
def test_the_curve_is_close_to_the_exact_one_on_public_traces(name, share):
    prompts = [request.blocks for request in open_trace(whole_path(name))]
    assert off_by(prompts, share) < 0.003


@pytest.mark.ci
@pytest.mark.parametrize("share", sampled(0.05, 0.01, 0.25))
@pytest.mark.parametrize("kind", few(["chat", "agent", "few-shot", "rag"], "few-shot"))
def test_the_curve_is_close_where_sessions_begin_with_one_of_many_shared_prompts(kind, share):
    trace = Workload(parts_named(kind), 8000, seed=3)
    assert off_by([request.blocks for request in trace], share) < 0.001


@pytest.mark.cases(1)
@pytest.mark.parametrize("share", sampled(0.01, 0.05, 0.25))
@pytest.mark.parametrize("kind", ["agent", "rag", "mix"])
def test_the_error_that_it_says_covers_the_truth_where_it_is_known(kind, share):
    prompts = [request.blocks for request in Workload(parts_named(kind), 2000, seed=7)]
    curve, others = live_curve(prompts, share)
    exact = exact_curve([blocks[: curve.capacity_blocks - 1] for blocks in prompts], 1)
    for other in [*others, curve.capacity_blocks - 1]:
        error = curve.error_at(other)
        known = other < curve.capacity_blocks or not curve.num_filling
        assert (error is not None) == known
        if error is not None:
            assert abs(curve.at(other) - exact.at(other)) <= error


@pytest.mark.ci
def test_the_curve_is_unknown_beyond_prompts_that_the_pool_cut():
    tools = Agent(steps=30.0, agents=4)
    prompts = [request.blocks for request in Workload({"a": Traffic(tools)}, 2000, seed=5)]
    curve, _ = live_curve(prompts, 0.01)
    cut = [blocks[: curve.capacity_blocks - 1] for blocks in prompts]
    larger = 10 * curve.capacity_blocks
    assert curve.at(larger) == pytest.approx(exact_curve(cut, 1).at(larger), abs=0.001)
    assert abs(curve.at(larger) - exact_curve(prompts, 1).at(larger)) > 0.0273
    assert curve.num_filling == sum(len(blocks) >= curve.capacity_blocks - 1 for blocks in prompts)
    assert curve.error_at(larger) is None
    assert curve.error_at(curve.capacity_blocks) < 0.0064
    assert f"{curve.num_filling:,} of which took the whole pool" in str(curve)


def off_by(prompts, share):
    """Serve prompts, cut to the pool; return how far the live curve is from the exact one at most."""
    curve, others = live_curve(prompts, share)
    exact = exact_curve([blocks[: curve.capacity_blocks - 1] for blocks in prompts], 1)
    return max(abs(curve.at(other) - exact.at(other)) for other in others)


def live_curve(prompts, share):
    """Serve prompts, cut to the pool, a token for each block; return the curve, and capacities to look at."""
    names = 1 + max(int(blocks.max()) for blocks in prompts if len(blocks))
    capacity = int(names * share)
    prompts = [blocks[:capacity] for blocks in prompts]
    manager = CacheManager(capacity + 1, 1, sub_block=False, watchers=watchers(curve=True))
    for blocks in prompts:
        tokens = np.concatenate((blocks, LAST))
        seq = manager.open(tokens)
        found = seq.computed
        manager.reserve(seq, len(tokens) - found)
        if len(blocks) > found:
            manager.commit(seq, tokens[found:-1])
        manager.close(seq)
    curve = what_if(manager)
    assert curve.num_requests == len(prompts)
    return curve, [int(names * other) for other in SHARES] + [int(capacity * by) for by in TIMES]


@pytest.mark.ci
def test_the_latest_requests_are_remembered(monkeypatch):
    monkeypatch.setattr("quire.foresight.curve.MAX_NOTES", 1000)
    monkeypatch.setattr("quire.foresight.curve.PACK_EVERY", 200)
    prompts, names = talks(2, num_talks=1200)
    curve = what_if(served(prompts, names // 10))
    assert curve.num_requests == len(prompts)
    assert 750 <= curve.noted_requests <= 1000
    before = len(prompts) - curve.noted_requests
    exact = exact_curve(prompts, count_from=before)
    for share in SHARES:
        capacity = int(names * share)
        assert curve.at(capacity) == pytest.approx(exact.at(capacity), abs=0.02)


def test_sessions_of_two_scopes_are_two():
    prompts, names = talks(4, num_talks=60)
    manager = CacheManager(2 * names + 2, BLOCK, sub_block=False, watchers=watchers(curve=True))
    for blocks in prompts:
        for tenant in ("a", "b"):
            serve(manager, tokens_of(blocks), Scope(salt=tenant))
    alone = what_if(served(prompts, names))
    both = what_if(manager)
    exact = exact_curve(prompts)
    assert alone.ceiling == pytest.approx(exact.ceiling, abs=0.02)
    assert both.ceiling == pytest.approx(exact.ceiling, abs=0.02)
    assert both.at(names // 10) < alone.at(names // 10) + 0.02


def test_generated_tokens_count_in_the_curve():
    prompts, names = talks(5, num_talks=100)

    def replay(num_generated):
        manager = CacheManager(4 * names, BLOCK, sub_block=False, watchers=watchers(curve=True))
        for blocks in prompts:
            tokens = tokens_of(blocks)
            reply = np.full(num_generated, 7, np.int32)
            seq = manager.open(tokens)
            manager.reserve(seq, len(tokens) - seq.computed + num_generated)
            manager.commit(seq, tokens[seq.computed :])
            if num_generated:
                manager.commit(seq, reply)
            manager.close(seq)
        return what_if(manager)

    silent, talkative = replay(0), replay(20 * BLOCK)
    assert talkative.at(names // 10) < silent.at(names // 10) - 0.02
    assert talkative.ceiling == pytest.approx(silent.ceiling, abs=0.01)


@given(st.integers(0, 1000), st.integers(30, 400))
@settings(max_examples=10, deadline=None)
def test_the_curve_rises_and_changes_nothing_in_the_cache(seed, capacity):
    prompts, _ = talks(seed, num_talks=20, shared=3)
    prompts = [blocks[:capacity] for blocks in prompts]
    watched = served(prompts, capacity)
    plain = CacheManager(capacity + 2, BLOCK, sub_block=False, watchers=watchers())
    for blocks in prompts:
        serve(plain, tokens_of(blocks))
    curve = what_if(watched)
    assert ops.snapshot(watched) == ops.snapshot(plain)
    assert np.all(np.diff(curve.token_hit) >= -1e-12)
    assert np.all(np.diff(curve.capacities) > 0)
    assert 0 <= curve.ceiling <= 1
    again = what_if(served(prompts, capacity))
    assert again.capacities.tolist() == curve.capacities.tolist()
    assert again.token_hit.tolist() == curve.token_hit.tolist()


@drawn(3, 200, st.integers(0, 10**6), st.integers(10, 60))
def test_requests_are_counted_as_without_the_curve(seed, capacity):
    random = Random(seed)
    groups = [LayerGroup("full", capacity), LayerGroup("window", 9, SlidingWindow(5))]
    both = [
        CacheManager(groups=groups, block_size=4, watchers=watchers(curve=curve))
        for curve in (True, False)
    ]
    texts = [np.array([[head] * 6, [tail] * 6]).ravel() for head in range(3) for tail in range(4)]
    for _ in range(300):
        text = np.concatenate([random.choice(texts), random.choice(texts)])[: random.randint(1, 24)]
        scope = random.choice([None, None, Scope(salt="a"), Scope(salt="b")])
        for manager in both:
            serve(manager, text.astype(np.int32), scope)
        what = random.randrange(20)
        if what < 3:
            assert both[0].stats == both[1].stats
        elif what == 3:
            what_if(both[0])
        elif what == 4:
            watcher(both[0], LiveCurve).restart()
    assert both[0].stats == both[1].stats
    ops.check(both[0])


def test_a_note_names_the_last_request_that_used_all_of_what_was_found_or_forgotten():
    manager = CacheManager(64, BLOCK, sub_block=False, watchers=watchers(curve=True))

    def noted(num_blocks, *more):
        serve(manager, tokens_of(np.array([*range(num_blocks), *more])))
        return tuple(watcher(manager, LiveCurve)._notes[-2:])

    def forget(num_blocks):
        ops.reclaim(manager, num_blocks)

    assert noted(10)[0] == 0
    assert noted(10) == (10 * BLOCK, 1)
    assert noted(4) == (4 * BLOCK, 2)
    assert noted(4, 99) == (4 * BLOCK, 3)
    assert noted(12) == (10 * BLOCK, 2)
    forget(8)
    assert noted(4) == (4 * BLOCK, 5)
    forget(4)
    assert noted(12) == (12 * BLOCK, 5)
    assert noted(4, 99) == (5 * BLOCK, 4)
    assert noted(4) == (4 * BLOCK, 8)
    forget(13)
    assert noted(4) == (4 * BLOCK, 9)
    assert noted(4, 99) == (5 * BLOCK, 8)


def test_blocks_that_are_added_beside_another_hit_are_not_that_ones():
    manager = CacheManager(100, 4, sub_block=False, watchers=watchers(curve=True))
    prompt = np.arange(16, dtype=np.int32)
    seq = manager.open(prompt)
    manager.reserve(seq, 16)
    manager.commit(seq, prompt[:8])
    serve(manager, np.append(prompt[:8], LAST))
    manager.commit(seq, prompt[8:])
    manager.close(seq)
    serve(manager, np.append(prompt, LAST))
    assert watcher(manager, LiveCurve)._notes[-3:] == [17, 16, 1]


def test_after_an_open_that_was_interrupted_the_curve_begins_anew(monkeypatch):
    manager = CacheManager(50, 1, sub_block=False, watchers=watchers(curve=True))
    prompt = np.arange(6, dtype=np.int32)
    for _ in range(3):
        serve(manager, prompt)
    with monkeypatch.context() as patched:
        patched.setattr("quire.core.take.attach", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            manager.open(prompt)
    manager.reset()
    for _ in range(3):
        serve(manager, prompt)
    assert what_if(manager).ceiling == pytest.approx(10 / 18)


@pytest.mark.cases(1)
@pytest.mark.parametrize("restored", [False, True])
def test_restored_blocks_lie_below_shared_ones_in_the_curve(restored):
    manager, plain = (
        CacheManager(130, 1, sub_block=False, watchers=watchers(curve=curve))
        for curve in (True, False)
    )
    shared = np.arange(50)
    for number in range(2000):
        own = 1000 + number % 50 * 100 + np.arange(20)
        prompt = np.concatenate((shared, own, LAST)).astype(np.int32)
        for each in (manager, plain):
            if restored and number < 50:
                there = residency(each, prompt).accepted
                with restore(each, prompt, 70, {0: list(range(there, 70))}) as given_out:
                    given_out.commit()
            serve(each, prompt)
    curve = what_if(manager)
    for capacity, found in ((75, 0.704), (400, 0.704), (1100, 0.979)):
        assert curve.at(capacity) == pytest.approx(found, abs=0.02)
    assert manager.stats == plain.stats


def test_asking_in_between_changes_no_later_answer():
    prompts, names = talks(6)
    often = CacheManager(names // 10, BLOCK, sub_block=False, watchers=watchers(curve=True))
    for number, blocks in enumerate(prompts):
        serve(often, tokens_of(blocks))
        if number % 97 == 96:
            what_if(often)
    once = what_if(served(prompts, names // 10 - 2))
    assert what_if(often).at(names // 5) == pytest.approx(once.at(names // 5), abs=0.01)


@given(st.integers(0, 10**6), st.integers(60, 400))
@settings(max_examples=10, deadline=None)
def test_the_curve_reports_the_measured_hit_rate_and_its_own_error(seed, capacity):
    prompts, _ = talks(seed, num_talks=20, shared=3)
    prompts = [blocks[:50] for blocks in prompts]
    manager = served(prompts, capacity)
    curve = what_if(manager)
    assert curve.measured == manager.stats.hit_rate
    assert curve.error == abs(curve.hit_rate - curve.measured) < 0.02
    before = manager.stats
    watcher(manager, LiveCurve).restart()
    assert what_if(manager).measured is what_if(manager).error is None
    for blocks in prompts[:30]:
        serve(manager, tokens_of(blocks))
    found = manager.stats.hit_tokens - before.hit_tokens
    asked = manager.stats.prompt_tokens - before.prompt_tokens
    assert what_if(manager).measured == found / asked


def test_a_curve_that_is_off_says_so():
    exact = WhatIf(100, np.array([0.0, 200.0]), np.array([0.0, 0.5]), 9, 9, measured=0.252)
    assert "the cache itself" not in str(exact)
    off = WhatIf(100, np.array([0.0, 200.0]), np.array([0.0, 0.5]), 9, 9, measured=0.3)
    assert str(off).endswith("(LRU, the latest 9 requests; the cache itself found 30.0 %)")
    assert off.error == pytest.approx(0.05)


def test_a_curve_begun_anew_forgets():
    prompts, names = talks(7, num_talks=50)
    manager = served(prompts, names)
    watcher(manager, LiveCurve).restart()
    assert what_if(manager).num_requests == 0
    assert str(what_if(manager)).startswith("no request yet")
    serve(manager, tokens_of(prompts[0]))
    assert what_if(manager).num_requests == 1


def test_the_curve_states_the_hit_rate_of_twice_the_memory():
    prompts, names = talks(1)
    curve = what_if(served(prompts, names // 20))
    now, more = curve.hit_rate, curve.at(2 * curve.capacity_blocks)
    assert curve.hit_rate == curve.at(curve.capacity_blocks)
    said = f"twice the memory would raise the hit rate from {100 * now:.0f} to {100 * more:.0f} %"
    assert str(curve).startswith(said)
    assert (curve.at(0), curve.at(10**9)) == (0.0, curve.ceiling)
    with pytest.raises(ConfigError, match="at least 0 blocks"):
        curve.at(-1)


def test_hits_inside_blocks_are_in_the_curve():
    manager = CacheManager(200, BLOCK, watchers=watchers(curve=True))
    random = Random(8)
    for _ in range(60):
        shared = random.choice((5, 20, 40))
        prompt = [7] * shared + [random.randrange(9, 10**6) for _ in range(random.randrange(1, 30))]
        serve(manager, np.array(prompt, np.int32))
    measured = manager.stats.hit_rate
    curve = what_if(manager)
    assert measured > 0.2
    assert curve.hit_rate == pytest.approx(measured, abs=0.02)
    assert curve.ceiling >= curve.hit_rate
    assert curve.at(0) == 0
