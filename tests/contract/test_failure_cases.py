"""How caches like this one have failed elsewhere; each case by its number.

Cases of other parts of quire (slots, sliding windows, recurrent state, tiers, tensors) stand
with those parts.
"""

import pytest
from core_help import found, generate, prefill, rejected, run, serve, state

from quire import errors
from quire.core import CacheManager, LayerGroup
from quire.exchange import block_hashes

BLOCK = 4
POLICIES = ("lru", "fifo", "lfu")


def make(num_blocks=16, **options):
    return CacheManager(num_blocks=num_blocks, block_size=BLOCK, **options)


def counts(manager):
    return manager.num_free, manager.num_active, manager.num_cached


@pytest.mark.parametrize("policy", POLICIES)
def test_case_01_a_lookup_after_any_eviction_works(policy):
    manager = make(policy=policy)
    trunk = list(range(2 * BLOCK))
    prompts = [[*trunk, *run(start, BLOCK + 2)] for start in (1000, 2000, 3000)]
    for prompt in prompts:
        serve(manager, prompt)
    while manager.num_cached:
        manager.reclaim(1)
        for prompt in prompts:
            hit = manager.probe(prompt)
            seq = manager.open(prompt)
            assert seq.num_cached == hit.num_tokens
            manager.close(seq)
        manager.check()


def test_case_02_more_pinned_than_capacity_fails_fast():
    manager = make(num_blocks=4, pin_budget=1.0)
    serve(manager, run(0, 4 * BLOCK))
    pin = manager.pin(run(0, 4 * BLOCK))
    seq = manager.open(run(1000, BLOCK))
    with rejected(manager, errors.OutOfBlocks):
        manager.reserve(seq, BLOCK)
    assert manager.reclaim(4) == 0
    pin.close()
    manager.reserve(seq, BLOCK)


def test_case_02_pins_beyond_their_budget_fail_fast():
    manager = make(num_blocks=8)
    for start in (0, 1000):
        serve(manager, run(start, 3 * BLOCK))
    manager.pin(run(0, 3 * BLOCK))
    with rejected(manager, errors.PinBudgetExceeded):
        manager.pin(run(1000, 3 * BLOCK))


@pytest.mark.parametrize("policy", POLICIES)
def test_case_03_descendants_go_before_ancestors(policy):
    manager = make(policy=policy)
    trunk = list(range(2 * BLOCK))
    prompts = [[*trunk, *run(start, BLOCK)] for start in (1000, 2000, 3000)]
    for prompt in prompts:
        serve(manager, prompt)
    while manager.num_cached:
        manager.reclaim(1)
        resident = {tuple(prompt[:end]) for prompt in prompts for end in (4, 8, 12)
                    if found(manager, prompt) >= end}  # fmt: skip
        assert len(resident) == manager.num_cached


def test_case_05_every_misuse_raises_and_changes_nothing():
    manager = make()
    seq = prefill(manager, run(0, 6))
    manager.close(seq)
    for misuse in (manager.close, manager.fork, manager.suspend, manager.resume):
        with rejected(manager, errors.SequenceError):
            misuse(seq)
    assert sum(counts(manager)) == 16
    assert manager.num_active == 0


def test_case_06_a_hit_takes_no_blocks_for_what_it_found():
    manager = make()
    serve(manager, run(0, 4 * BLOCK))
    for _ in range(50):
        seq = prefill(manager, [*run(0, 4 * BLOCK), 7, 7])
        assert counts(manager) == (11, 5, 0)
        manager.close(seq)
        assert counts(manager) == (12, 0, 4)


def test_case_07_a_match_compares_all_tokens():
    manager = make(num_blocks=64)
    prompt = run(0, 120)
    serve(manager, prompt)
    for position in range(120):
        other = prompt.copy()
        other[position] += 1
        assert manager.probe(other).num_tokens == min(position, 119)


def test_case_07_keys_that_leave_the_process_are_256_bit():
    assert {len(key) for key in block_hashes(run(0, 12), BLOCK)} == {32}


def test_case_08_what_the_index_names_is_given_to_nobody_else():
    manager = make(num_blocks=8)
    serve(manager, run(0, 3 * BLOCK))
    reader = manager.open([*run(0, 3 * BLOCK), 1])
    held = set(reader.block_ids()[:3].tolist())
    manager.close(reader)
    other = prefill(manager, run(1000, 5 * BLOCK))
    assert held.isdisjoint(other.block_ids().tolist())
    again = manager.open([*run(0, 3 * BLOCK), 1])
    assert set(again.block_ids()[:3].tolist()) == held


def test_case_09_a_failed_copy_on_write_keeps_nothing():
    manager = make(num_blocks=2)
    seq = prefill(manager, run(0, 6))
    twin = manager.fork(seq)
    with rejected(manager, errors.OutOfBlocks):
        manager.reserve(twin, 1)
    assert manager.take_copies() == []
    manager.close(seq)
    manager.reserve(twin, 1)
    assert manager.take_copies() == []


def test_case_09_a_failed_resume_keeps_the_sequence_resumable():
    manager = make(num_blocks=4)
    seq = prefill(manager, run(0, 10))
    manager.suspend(seq)
    blocker = prefill(manager, run(1000, 16))
    before = state(manager)
    try:
        missing = manager.resume(seq)
    except errors.OutOfBlocks:
        assert state(manager) == before
        manager.close(blocker)
        missing = manager.resume(seq)
    else:
        manager.close(blocker)
    assert missing == 10 - seq.computed
    generate(manager, seq, run(0, 10)[seq.computed :])
    assert seq.tokens.tolist() == list(range(10))


def test_case_10_no_block_has_two_owners():
    manager = make(num_blocks=32)
    seqs = [prefill(manager, run(1000 * i, 7)) for i in range(4)]
    for seq in seqs[::2]:
        manager.truncate(seq, 3)
        generate(manager, seq, [*run(1000 * seqs.index(seq), 7)[3:], *range(6)])
    manager.close(seqs.pop(1))
    seqs.append(prefill(manager, run(9000, 9)))
    ids = [block for seq in seqs for block in seq.block_ids().tolist()]
    assert len(set(ids)) == len(ids)


def test_case_11_active_blocks_are_never_victims():
    manager = make(num_blocks=4)
    seq = prefill(manager, run(0, 3 * BLOCK))
    table = seq.block_ids().tolist()
    with rejected(manager, errors.OutOfBlocks):
        manager.open(run(1000, 112))
    other = manager.open(run(2000, BLOCK))
    with rejected(manager, errors.OutOfBlocks):
        manager.reserve(other, 2 * BLOCK)
    manager.reclaim(99)
    assert seq.block_ids().tolist() == table
    assert found(manager, run(0, 3 * BLOCK)) == 3 * BLOCK


def test_case_12_a_hit_is_contiguous():
    manager = make()
    serve(manager, run(0, 6 * BLOCK))
    manager.reclaim(4)
    assert found(manager, run(0, 6 * BLOCK)) == 2 * BLOCK
    serve(manager, run(4 * BLOCK, 2 * BLOCK))
    assert found(manager, run(0, 6 * BLOCK)) == 2 * BLOCK


def test_case_12_a_hit_is_whole_in_every_layer_group():
    groups = [LayerGroup("wide", 12), LayerGroup("narrow", 6)]
    manager = CacheManager(block_size=BLOCK, groups=groups, sub_block=False)
    for start in (0, 1000, 2000):
        serve(manager, run(start, 3 * BLOCK))
    for start in (0, 1000, 2000):
        seq = manager.open(run(start, 3 * BLOCK + 1))
        assert len(seq.block_ids(0)) == len(seq.block_ids(1)) == seq.num_cached // BLOCK
        manager.close(seq)
    assert found(manager, run(2000, 3 * BLOCK)) == 3 * BLOCK


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_case_13_recency_and_frequency_move_on_every_open(policy):
    manager = make(num_blocks=4, policy=policy, sub_block=False)
    serve(manager, run(0, BLOCK))
    serve(manager, run(1000, BLOCK))
    for _ in range(100):
        manager.close(manager.open(run(0, BLOCK + 1)))
    manager.reclaim(1)
    assert found(manager, run(0, BLOCK)) == BLOCK
    assert found(manager, run(1000, BLOCK)) == 0


def test_case_15_a_commit_of_what_is_cached_frees_only_its_own_blocks():
    manager = make()
    seqs = [manager.open(run(0, 3 * BLOCK)) for _ in range(3)]
    for seq in seqs:
        manager.reserve(seq, 3 * BLOCK)
        manager.commit(seq, run(0, 3 * BLOCK))
        manager.check()
    assert counts(manager) == (13, 3, 0)
    tables = {tuple(seq.block_ids().tolist()) for seq in seqs}
    assert len(tables) == 1
    for seq in seqs:
        manager.close(seq)
    assert counts(manager) == (13, 0, 3)
    assert found(manager, run(0, 3 * BLOCK)) == 3 * BLOCK


def test_case_16_counters_follow_what_is_there():
    manager = make(num_blocks=8)
    for i in range(200):
        serve(manager, run(1000 * (i % 11), 3 + i % 14))
        assert sum(counts(manager)) == 8
        manager.check()
    assert manager.clear() == 8 - manager.num_free or manager.num_cached == 0
    assert counts(manager) == (8, 0, 0)
    serve(manager, run(0, 8 * BLOCK))
