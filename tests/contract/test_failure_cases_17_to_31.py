"""How caches like this one have failed elsewhere; each case by its number.

Cases of other parts of quire (slots, sliding windows, recurrent state, tiers, tensors) stand
with those parts.
"""

import gc
import weakref

import numpy as np
import pytest
from core_help import found, generate, prefill, run, serve, state

from quire.core import CacheManager, MediaItem, Scope
from quire.exchange import block_hashes

BLOCK = 4
POLICIES = ("lru", "fifo", "lfu")


def make(num_blocks=16, **options):
    return CacheManager(num_blocks=num_blocks, block_size=BLOCK, **options)


def counts(manager):
    return manager.num_free, manager.num_active, manager.num_cached


def test_case_17_a_hash_depends_on_tokens_and_scope_alone():
    first = block_hashes(run(0, 12), BLOCK, Scope(salt="a"))
    block_hashes(run(5000, 12), BLOCK)
    assert block_hashes(run(0, 12).tolist(), BLOCK, Scope(salt="a")) == first
    assert block_hashes(run(0, 14), BLOCK, Scope(salt="a")) == first
    assert set(block_hashes(run(0, 12), BLOCK)).isdisjoint(first)
    assert block_hashes(run(0, 12), BLOCK) == block_hashes(run(0, 12), BLOCK, Scope())


def test_case_17_a_block_hash_covers_all_tokens_before_it():
    left, right = block_hashes([1, 2, 3, 4, 5, 6], 2), block_hashes([1, 9, 3, 4, 5, 6], 2)
    assert set(left).isdisjoint(right)


def test_case_18_pictures_with_equal_placeholders_share_nothing():
    manager = make()
    prompt = [1, 1, 5, 5, 5, 5, 2, 2, 3]
    cat, dog = ([MediaItem(name * 32, 2, 4)] for name in (b"c", b"d"))
    serve(manager, prompt, media=cat)
    assert manager.probe(prompt, media=cat).num_tokens == 8
    assert manager.probe(prompt, media=dog).num_tokens <= 2
    assert manager.probe(prompt).num_tokens <= 2
    assert block_hashes(prompt, BLOCK, media=cat) != block_hashes(prompt, BLOCK, media=dog)
    serve(manager, prompt, media=dog)
    assert manager.probe(prompt, media=cat).num_tokens == 8


def test_case_18_the_place_of_a_picture_counts():
    manager = make()
    prompt = [5] * 9
    serve(manager, prompt, media=[MediaItem(b"c" * 32, 0, 4)])
    assert manager.probe(prompt, media=[MediaItem(b"c" * 32, 4, 4)]).num_tokens == 0


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (Scope(lora="a", salt="b"), Scope(lora="ab")),
        (Scope(lora="a", salt="b"), Scope(salt="ab")),
        (Scope(salt="a"), Scope(lora="a")),
        (Scope(salt="a"), Scope(model="a")),
        (Scope(salt="a"), Scope(salt=b"a")),
        (Scope(salt="1"), Scope(salt=1)),
        (Scope(salt=""), Scope()),
        (Scope(salt=b""), Scope(salt="")),
        (Scope(salt=0), Scope()),
        (Scope(salt="a\x00", lora="b"), Scope(salt="a", lora="\x00b")),
    ],
)
def test_case_19_scopes_meet_only_when_every_part_is_equal(left, right):
    manager = make()
    serve(manager, run(0, 8), left)
    assert found(manager, run(0, 8), right) == 0
    assert found(manager, run(0, 8), left) == 8
    assert set(block_hashes(run(0, 8), BLOCK, left)).isdisjoint(
        block_hashes(run(0, 8), BLOCK, right)
    )


def test_case_20_only_computed_blocks_are_found():
    manager = make()
    seq = manager.open(run(0, 12))
    manager.reserve(seq, 12)
    assert manager.probe(run(0, 12)).num_tokens == 0
    manager.commit(seq, run(0, 6))
    assert manager.probe(run(0, 12)).num_tokens == 4
    manager.suspend(seq)
    assert manager.probe(run(0, 12)).num_tokens == 4
    manager.close(seq)
    assert manager.probe(run(0, 12)).num_tokens == 4
    assert counts(manager) == (15, 0, 1)


def test_case_21_two_identical_prefills_leave_one_copy():
    manager = make()
    first, second = manager.open(run(0, 10)), manager.open(run(0, 10))
    for seq in (first, second):
        manager.reserve(seq, 10)
    assert manager.num_active == 6
    manager.commit(first, run(0, 10))
    manager.commit(second, run(0, 10))
    assert manager.num_active == 4
    assert first.block_ids()[:2].tolist() == second.block_ids()[:2].tolist()
    assert first.block_ids()[2] != second.block_ids()[2]
    assert manager.stats.deduplicated_blocks == 2


def test_case_22_a_shipped_policy_keeps_a_system_prompt_under_one_shot_traffic():
    def kept(policy):
        manager = make(num_blocks=16, policy=policy, sub_block=False)
        system = run(0, 4 * BLOCK).tolist()
        for i in range(100):
            serve(manager, [*system, *run(1000 + i * 100, BLOCK)])
        for i in range(100):
            serve(manager, run(100_000 + i * 100, 8 * BLOCK))
        return found(manager, system) == len(system)

    assert [policy for policy in POLICIES if kept(policy)]


def test_case_22_a_priority_keeps_a_system_prompt_under_any_policy():
    for policy in POLICIES:
        manager = make(num_blocks=16, policy=policy, sub_block=False)
        serve(manager, run(0, 4 * BLOCK), priority=1)
        for i in range(100):
            serve(manager, run(100_000 + i * 100, 8 * BLOCK))
        assert found(manager, run(0, 4 * BLOCK)) == 4 * BLOCK


def test_case_23_no_part_of_a_chain_is_stranded():
    manager = make()
    serve(manager, run(0, 8 * BLOCK))
    manager.evict(run(0, BLOCK))
    assert found(manager, run(0, 8 * BLOCK)) == 0
    assert counts(manager) == (16, 0, 0)


def test_case_24_one_block_is_freed_when_one_is_asked():
    manager = make(num_blocks=512, sub_block=False)
    serve(manager, run(0, 500 * BLOCK))
    assert manager.reclaim(1) == 1
    assert found(manager, run(0, 500 * BLOCK)) == 499 * BLOCK
    seq = manager.open(run(5000, 14 * BLOCK))
    manager.reserve(seq, 14 * BLOCK)
    assert found(manager, run(0, 500 * BLOCK)) == 498 * BLOCK


def test_case_28_decisions_depend_on_inputs_alone():
    def history(clock):
        manager = make(num_blocks=6, clock=clock)
        states = []
        for i in range(60):
            serve(manager, run(1000 * (i * 5 % 9), BLOCK * (1 + i % 3)), priority=i % 2)
            states.append((state(manager), manager.take_copies()))
        return states

    ticks = iter(range(10**6))
    assert history(None) == history(lambda: 0.0) == history(lambda: float(next(ticks)))


def test_case_29_the_index_owns_its_bytes():
    manager = make()
    tokens = run(0, 12)
    seq = manager.open(tokens)
    manager.reserve(seq, 12)
    tokens[0] = 77
    manager.commit(seq, run(0, 12))
    tokens[:] = 88
    seq.tokens[:] = 99
    assert seq.tokens.tolist() == list(range(12))
    manager.close(seq)
    assert found(manager, run(0, 12)) == 12


def test_case_29_the_arrays_of_a_request_are_not_kept():
    manager = make()
    whole = run(0, 100_000)
    seq = prefill(manager, whole[:12])
    generate(manager, seq, whole[500:504])
    manager.close(seq)
    kept = weakref.ref(whole)
    del whole, seq
    gc.collect()
    assert kept() is None
    assert isinstance(manager.probe(run(0, 12)).num_tokens, int)


def test_case_31_salts_isolate():
    manager = make()
    serve(manager, run(0, 12), Scope(salt="mine"))
    for other in (None, Scope(), Scope(salt="yours")):
        assert manager.probe(run(0, 12), other).num_tokens == 0
        seq = manager.open(run(0, 12), other)
        assert seq.num_cached == 0
        manager.close(seq)
        assert manager.evict(run(0, 12), other) == 0
    assert manager.probe(run(0, 12), Scope(salt="mine")).num_tokens == 11
    assert np.all(prefill(manager, run(0, 12), Scope(salt="mine")).tokens == run(0, 12))
