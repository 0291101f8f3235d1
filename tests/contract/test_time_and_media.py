"""Retention, priorities and media where they meet splits, extensions and odd input."""

import pytest
from core_help import rejected, run, serve

from clocks import Clock
from quire import CacheManager, MediaItem, Scope, errors, ops


@pytest.fixture
def clock():
    return Clock()


def hit(manager, tokens):
    return manager.probe([*tokens, 0]).num_tokens


def test_retention_that_ends_after_a_split_evicts_tails_before_heads(clock):
    manager = CacheManager(64, 4, clock=clock, pool=ops.CheckedPool)
    prompt = list(range(1, 25))
    serve(manager, prompt, retain_s=10)
    manager.close(manager.open([*prompt[:12], 99]))
    clock.now += 20
    for left in (20, 16, 12, 8, 4, 0):
        ops.reclaim(manager, 1)
        ops.check(manager)
        assert hit(manager, prompt) == left


def test_a_run_whose_retention_has_ended_is_lengthened_by_ordinary_requests(clock):
    manager = CacheManager(64, 4, clock=clock)
    serve(manager, range(1, 9), retain_s=10)
    clock.now += 20
    serve(manager, range(1, 13))
    assert len(list(manager.kernel.tree.nodes())) == 1


def test_a_priority_that_rises_while_retention_runs_out_is_harmless(clock):
    manager = CacheManager(64, 4, clock=clock)
    prompt = list(range(1, 25))
    serve(manager, prompt, retain_s=10)
    seq = manager.open(prompt, priority=5)
    clock.now += 20
    manager.close(seq)
    assert ops.reclaim(manager, 1) == 1
    ops.check(manager)


def test_a_clock_that_steps_back_is_held(clock):
    manager = CacheManager(64, 4, clock=clock)
    first = manager.open([1] * 8)
    manager.reserve(first, 8)
    manager.commit(first, [1] * 8)
    serve(manager, [1] * 8 + [2] * 4, retain_s=10)
    clock.now += 11
    manager.close(first)
    clock.now -= 2
    ops.reclaim(manager, 1)
    ops.check(manager)


def test_reminders_of_retention_do_not_pile_up(clock):
    manager = CacheManager(64, 4, clock=clock)
    for _ in range(200):
        clock.now += 1
        serve(manager, [1] * 8, retain_s=60)
    assert len(manager.kernel.tree.order._due.items) <= 4


@pytest.mark.parametrize("policy", ["fifo", "lfu"])
def test_a_policy_does_not_grow_with_use(policy):
    manager = CacheManager(64, 4, policy=policy)
    for _ in range(500):
        serve(manager, [1] * 8)
    assert len(manager.kernel.tree.order._plain._heap.items) < 200


def test_text_behind_an_important_prompt_is_not_important_itself():
    manager = CacheManager(64, 4)
    system = [1] * 8
    serve(manager, system, priority=10)
    serve(manager, [5] * 8, priority=5)
    serve(manager, [*system, *[7] * 8], priority=0)
    ops.reclaim(manager, 2)
    assert hit(manager, [5] * 8) == 8
    assert hit(manager, [*system, *[7] * 8]) == 8


def test_evict_drops_what_starts_with_the_tokens_and_nothing_else():
    manager = CacheManager(64, 4)
    system = [1, 2, 3, 4] * 4
    for user in range(5):
        serve(manager, [*system, *[50 + user] * 4])
    assert ops.invalidate(manager, [*system, 50]) == 1
    assert [hit(manager, [*system, *[50 + user] * 4]) for user in range(5)] == [16] + [20] * 4
    assert ops.invalidate(manager, [9]) == 0
    assert ops.invalidate(manager, [1, 2]) == 8


def test_media_must_be_a_list_so_that_it_is_read_twice():
    manager = CacheManager(64, 4)
    picture = MediaItem(b"a" * 32, 0, 8)
    with rejected(manager, errors.MediaError, "list or tuple"):
        manager.open([7] * 9, media=(item for item in [picture]))


def test_media_contents_that_no_block_holds_are_forgotten(monkeypatch):
    monkeypatch.setattr("quire.core.media.MAX_MEDIA", 4)
    manager = CacheManager(8, 4)
    for number in range(50):
        serve(manager, [7] * 8, media=[MediaItem(bytes([number] * 32), 0, 8)])
        ops.check(manager)
    assert len(manager.kernel.tree.media) <= 16
    again = manager.probe([7] * 8 + [1], media=[MediaItem(bytes([49] * 32), 0, 8)])
    assert again.num_tokens == 8


def test_a_scope_that_cannot_be_written_down_is_refused_at_once():
    with pytest.raises(errors.ScopeError, match="UTF-8"):
        Scope(salt="\ud800")
    with pytest.raises(errors.ScopeError, match="salt"):
        Scope(salt=True)


def test_decisions_depend_on_inputs_alone():
    def history(clock):
        manager = CacheManager(6, 4, clock=clock)
        states = []
        for i in range(60):
            serve(manager, run(1000 * (i * 5 % 9), 4 * (1 + i % 3)), priority=i % 2)
            states.append((ops.snapshot(manager), manager.take_copies()))
        return states

    ticks = iter(range(10**6))
    assert history(None) == history(lambda: 0.0) == history(lambda: float(next(ticks)))


def test_a_pin_whose_time_is_over_goes_while_other_blocks_can_be_evicted(clock):
    manager = CacheManager(100, 4, clock=clock)
    serve(manager, run(90_000, 48 * 4))
    ops.pin(manager, run(90_000, 48 * 4), ttl_s=10)
    clock.now += 11
    found = []
    for number in range(400):
        prompt = run(1000 * (number % 8), 9 * 4)
        found.append(manager.probe([*prompt, 1]).num_tokens)
        serve(manager, prompt)
    assert manager.num_active == 0
    assert not manager.kernel.holds.all
    assert min(found[100:]) == 9 * 4
    ops.check(manager)


def test_the_next_reserve_lets_a_pin_go_whose_time_is_over_and_the_room_asked_for_counts_it(clock):
    manager = CacheManager(16, 4, clock=clock)
    serve(manager, run(0, 16))
    ops.pin(manager, run(0, 16), ttl_s=5)
    kept = ops.pin(manager, run(0, 8))
    assert ops.fits(manager, run(1000, 20)).room == (12,)
    clock.now += 6
    assert ops.fits(manager, run(1000, 20)).room == (14,)
    assert manager.num_active == 4
    seq = manager.open(run(1000, 5))
    manager.reserve(seq, 1)
    assert (manager.num_active, manager.num_cached) == (3, 2)
    assert kept.is_held
    assert manager.kernel.holds.first_due == float("inf")  # no reserve looks at pins in vain
    ops.check(manager)


def test_a_refused_reserve_lets_no_pin_go(clock):
    manager = CacheManager(16, 4, clock=clock)
    serve(manager, run(0, 16))
    ops.pin(manager, run(0, 16), ttl_s=5)
    clock.now += 6
    seq = manager.open(run(1000, 5))
    with rejected(manager, errors.OutOfBlocks):
        manager.reserve(seq, 1000)
    assert manager.num_active == 4
