"""Publishing, de-duplication, shared blocks and the copies they need."""

import gc
import weakref

import pytest
from core_help import generate, prefill, rejected, run, serve

from quire import errors, ops
from quire.core import CacheManager, MediaItem, Scope

BLOCK = 4


@pytest.fixture
def manager():
    return CacheManager(num_blocks=16, block_size=BLOCK)


def counts(manager):
    return manager.num_free, manager.num_active, manager.num_cached


# -- publishing ----------------------------------------------------------------------------


def test_a_block_is_found_only_after_its_commit(manager):
    seq = manager.open(run(0, 9))
    assert manager.probe(run(0, 9)).num_tokens == 0
    manager.reserve(seq, 9)
    assert manager.probe(run(0, 9)).num_tokens == 0
    manager.commit(seq, run(0, 3))
    assert manager.probe(run(0, 9)).num_tokens == 0
    manager.commit(seq, [3])
    assert manager.probe(run(0, 9)).num_tokens == 4


def test_a_partly_filled_block_is_never_found(manager):
    seq = prefill(manager, run(0, 7))
    assert manager.probe(run(0, 7)).num_tokens == 4
    manager.close(seq)
    assert counts(manager) == (15, 0, 1)


def test_identical_blocks_of_two_sequences_become_one(manager):
    first, second = manager.open(run(0, 9)), manager.open(run(0, 9))
    manager.reserve(first, 9)
    manager.reserve(second, 9)
    manager.commit(first, run(0, 9))
    manager.commit(second, run(0, 5))
    assert second.block_ids()[0] == first.block_ids()[0]
    manager.commit(second, run(5, 4))
    assert second.block_ids()[:2].tolist() == first.block_ids()[:2].tolist()
    assert second.block_ids()[2] != first.block_ids()[2]
    assert counts(manager) == (12, 4, 0)
    assert manager.stats.deduplicated_blocks == 2


def test_only_the_owner_of_a_table_changes_it(manager):
    first = prefill(manager, run(0, 9))
    table = first.block_ids().tolist()
    for _ in range(5):
        serve(manager, run(0, 9))
        serve(manager, [0, 1, 2, 3, 9, 9, 9, 9])
        serve(manager, run(1000, 40))
        assert first.block_ids().tolist() == table


def test_a_sequence_that_grows_stays_one_node():
    def nodes(chunks):
        manager = CacheManager(num_blocks=64, block_size=BLOCK)
        seq = manager.open([0])
        for chunk in chunks:
            generate(manager, seq, run(seq.computed, chunk))
        manager.close(seq)
        return len(ops.dump(manager).splitlines()), manager.num_cached

    assert nodes([1] * 96) == nodes([5] * 19 + [1]) == nodes([96])


def test_a_conversation_that_grows_stays_one_node():
    def nodes(turns):
        manager = CacheManager(num_blocks=64, block_size=BLOCK)
        for length in turns:
            serve(manager, run(0, length))
        return len(ops.dump(manager).splitlines()), manager.num_cached

    assert nodes(range(8, 97, 8)) == nodes([96])


# -- sharing and copies --------------------------------------------------------------------


def test_a_found_prefix_costs_no_blocks(manager):
    first = prefill(manager, run(0, 9))
    second = manager.open(run(0, 9))
    assert second.block_ids().tolist() == first.block_ids()[:2].tolist()
    assert counts(manager) == (13, 3, 0)


def test_the_shared_head_of_a_block_is_copied(manager):
    first = prefill(manager, run(0, 8))
    second = manager.open([0, 1, 2, 3, 4, 5, 99])
    assert (second.num_cached, second.computed) == (6, 6)
    (copy,) = manager.take_copies()
    assert (copy.group, copy.num_tokens) == (0, 2)
    assert copy.src == first.block_ids()[1]
    assert copy.dst == second.block_ids()[1] != copy.src
    assert manager.take_copies() == []
    assert manager.stats.copied_blocks == 1


def test_without_sub_blocks_only_whole_blocks_are_found():
    manager = CacheManager(num_blocks=16, block_size=BLOCK, sub_block=False)
    serve(manager, run(0, 8))
    assert manager.probe([0, 1, 2, 3, 4, 5, 99]).num_tokens == 4
    assert manager.open(run(0, 8)).num_cached == 4
    assert manager.take_copies() == []


def test_the_source_of_a_copy_stays_until_the_copy_was_taken():
    manager = CacheManager(num_blocks=4, block_size=BLOCK)
    serve(manager, run(0, 8))
    seq = manager.open([0, 1, 2, 3, 4, 5, 99])
    manager.reserve(seq, 1)
    ops.invalidate(manager)
    blocker = manager.open(run(1000, 4))
    manager.reserve(blocker, 4)
    (copy,) = manager.take_copies()
    assert copy.dst == seq.block_ids()[1]
    assert copy.src not in seq.block_ids()
    ops.check(manager)


def test_a_fork_costs_no_blocks(manager):
    seq = prefill(manager, run(0, 6))
    twin = manager.fork(seq)
    assert twin.tokens.tolist() == seq.tokens.tolist()
    assert twin.block_ids().tolist() == seq.block_ids().tolist()
    assert (twin.computed, twin.prompt_len, twin.scope) == (6, 6, seq.scope)
    assert counts(manager) == (14, 2, 0)


def test_the_first_write_into_a_shared_block_copies_it(manager):
    seq = prefill(manager, run(0, 6))
    twin = manager.fork(seq)
    shared = int(seq.block_ids()[1])
    manager.reserve(twin, 1)
    (copy,) = manager.take_copies()
    assert (copy.src, copy.dst, copy.num_tokens) == (shared, twin.block_ids()[1], 2)
    assert seq.block_ids()[1] == shared
    manager.reserve(seq, 1)
    assert manager.take_copies() == []
    assert seq.block_ids()[1] == shared


def test_a_fork_at_a_block_boundary_needs_no_copy(manager):
    seq = prefill(manager, run(0, 8))
    twin = manager.fork(seq)
    generate(manager, seq, [70])
    generate(manager, twin, [80])
    assert manager.stats.copied_blocks == 0
    assert seq.block_ids()[2] != twin.block_ids()[2]


def test_a_fork_within_its_prompt_must_continue_that_prompt(manager):
    seq = manager.open(run(0, 6))
    manager.reserve(seq, 3)
    manager.commit(seq, run(0, 3))
    twin = manager.fork(seq)
    manager.reserve(twin, 3)
    manager.take_copies()
    with rejected(manager, errors.CommitError):
        manager.commit(twin, [3, 4, 99])
    manager.commit(twin, [3, 4, 5])


def test_a_failed_copy_on_write_keeps_nothing():
    manager = CacheManager(num_blocks=2, block_size=BLOCK)
    seq = prefill(manager, run(0, 6))
    twin = manager.fork(seq)
    with rejected(manager, errors.OutOfBlocks):
        manager.reserve(twin, 1)
    assert manager.take_copies() == []
    manager.close(seq)
    manager.reserve(twin, 1)
    assert manager.take_copies() == []


# -- what is compared ----------------------------------------------------------------------


def test_a_match_compares_all_tokens():
    manager = CacheManager(num_blocks=64, block_size=BLOCK)
    prompt = run(0, 120)
    serve(manager, prompt)
    for position in range(120):
        other = prompt.copy()
        other[position] += 1
        assert manager.probe(other).num_tokens == min(position, 119)


def test_the_tree_owns_its_bytes(manager):
    tokens = run(0, 12)
    seq = manager.open(tokens)
    manager.reserve(seq, 12)
    tokens[0] = 77
    manager.commit(seq, run(0, 12))
    tokens[:] = 88
    seq.tokens[:] = 99
    assert seq.tokens.tolist() == list(range(12))
    manager.close(seq)
    assert manager.probe(run(0, 13)).num_tokens == 12


def test_the_arrays_of_a_request_are_not_kept(manager):
    whole = run(0, 100_000)
    seq = prefill(manager, whole[:12])
    generate(manager, seq, whole[500:504])
    manager.close(seq)
    kept = weakref.ref(whole)
    del whole, seq
    gc.collect()
    assert kept() is None


def test_pictures_are_shared_by_content_and_place():
    manager = CacheManager(num_blocks=16, block_size=BLOCK)
    prompt = [1, 1, 5, 5, 5, 5, 2, 2, 3]
    cat, dog = ([MediaItem(name * 32, 2, 4)] for name in (b"c", b"d"))
    serve(manager, prompt, media=cat)
    assert manager.probe(prompt, media=cat).num_tokens == 8
    assert manager.probe(prompt, media=dog).num_tokens <= 2
    assert manager.probe(prompt).num_tokens <= 2
    assert manager.probe(prompt, media=[MediaItem(b"c" * 32, 1, 4)]).num_tokens == 1


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
        (Scope(salt="a"), None),
        (Scope(salt="a\x00", lora="b"), Scope(salt="a", lora="\x00b")),
    ],
)
def test_scopes_meet_only_when_every_part_is_equal(manager, left, right):
    serve(manager, run(0, 8), left)
    assert manager.probe(run(0, 9), right).num_tokens == 0
    assert ops.invalidate(manager, run(0, 8), right) == 0
    assert manager.probe(run(0, 9), left).num_tokens == 8
