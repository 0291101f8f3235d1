"""Prefixes whose bytes come from elsewhere: what is given out, and what is found afterwards."""

import numpy as np
import pytest
from core_help import found, prefill, rejected, run, serve
from hybrid_help import conserved, make, serve_in_pieces

from quire import ops
from quire.core import FullAttention
from quire.errors import ConfigError, CopyError, MediaError, OutOfBlocks, SequenceError
from quire.exchange import block_hashes, hold, required_blocks, residency, restore
from quire.groups import ChunkedAttention, Recurrent, SlidingWindow
from watching import take_evicted, watchers

FULL, SLIDING, STATE = FullAttention(), SlidingWindow(8), Recurrent()


def bring(manager, tokens, scope=None, **extra):
    """Restore all that a hit of `tokens` lacks; return what was brought."""
    here = residency(manager, [*tokens, 0], scope, **extra)
    end = len(tokens) // manager.block_size
    brought = {}
    for group in range(len(manager.pools)):
        held = set(np.flatnonzero(here.held[group]).tolist())
        brought[group] = [at for at in required_blocks(manager, group, end) if at not in held]
    with restore(manager, tokens, end, brought, scope, **extra) as restored:
        for group, places in brought.items():
            assert len(restored.blocks[group]) == len(places)
        restored.commit()
    return brought


def test_a_restored_prefix_is_found_and_counts_as_no_request():
    manager = make(("full", 20, FULL))
    assert bring(manager, run(0, 16)) == {0: [0, 1, 2, 3]}
    assert found(manager, run(0, 16)) == 16
    assert manager.stats.num_requests == 0
    assert manager.stats.restored_blocks == 4
    assert manager.stats.computed_tokens == manager.stats.published_blocks == 0
    assert not manager.sequences
    assert conserved(manager)


def test_nothing_is_found_before_the_commit_and_without_one_all_goes_back():
    manager = make(("full", 20, FULL), ("sliding", 20, SLIDING), ("state", 4, STATE))
    brought = {0: [0, 1, 2, 3], 1: [2, 3], 2: [3]}
    with restore(manager, run(0, 16), 4, brought):
        assert found(manager, run(0, 16)) == 0
        assert [pool.num_active for pool in manager.pools] == [4, 2, 1]
        ops.check(manager)
    assert [pool.num_free for pool in manager.pools] == [20, 20, 4]
    assert conserved(manager)


def test_blocks_that_were_not_brought_are_gaps_that_no_lookup_passes():
    manager = make(("full", 20, FULL), ("sliding", 20, SLIDING))
    assert bring(manager, run(0, 24)) == {0: [0, 1, 2, 3, 4, 5], 1: [4, 5]}
    assert found(manager, run(0, 24)) == 24
    for shorter in (20, 16, 12, 8):
        assert found(manager, run(0, shorter)) == 0, "the window before this length is not there"
    assert manager.pools[1].num_cached == 2


def test_a_state_is_there_at_its_own_boundary_only():
    manager = make(("full", 20, FULL), ("state", 4, STATE))
    assert bring(manager, run(0, 24)) == {0: [0, 1, 2, 3, 4, 5], 1: [5]}
    assert [found(manager, run(0, length)) for length in (24, 20, 4)] == [24, 0, 0]


def test_only_what_the_sparse_groups_lost_comes_back_where_the_full_one_has_all():
    manager = make(("full", 20, FULL), ("sliding", 20, SLIDING), ("state", 9, STATE))
    branches = [np.append(run(0, 24), run(start, 9)) for start in (1000, 2000)]
    for branch in branches:
        serve_in_pieces(manager, branch)
    assert found(manager, run(0, 24)) == 24
    for _ in branches:  # the part that was used last is evicted last
        serve_in_pieces(manager, branches[0])
    for group in (1, 2):
        while required_blocks(manager, group, 6)[-1] in np.flatnonzero(held(manager, group)):
            assert ops.reclaim(manager, 1, group=group) == 1
    here = residency(manager, [*run(0, 24), 0])
    assert (here.matched, here.accepted) == (6, 0)
    brought = bring(manager, run(0, 24))
    assert brought[0] == []
    assert brought[2] == [5]
    assert brought[1]
    assert found(manager, run(0, 24)) == 24
    assert manager.stats.restored_blocks == 0
    assert conserved(manager)


def held(manager, group):
    return residency(manager, [*run(0, 24), 0]).held[group]


def test_the_path_that_is_there_is_not_evicted_to_make_room_for_the_rest():
    manager = make(("full", 7, FULL))
    serve(manager, run(0, 17))
    serve(manager, run(1000, 9))
    assert bring(manager, run(0, 24)) == {0: [4, 5]}
    assert found(manager, run(0, 24)) == 24
    assert found(manager, run(1000, 8)) == 4


def test_a_restore_larger_than_room_is_refused():
    manager = make(("full", 6, FULL))
    seq = prefill(manager, run(1000, 8))
    serve(manager, run(0, 8))
    assert residency(manager, run(0, 25)).room == (2,)
    with rejected(manager, OutOfBlocks, "restoring 6 blocks"):
        restore(manager, run(0, 24), 6, {0: [2, 3, 4, 5]})
    assert bring(manager, run(0, 16)) == {0: [2, 3]}
    manager.close(seq)


def test_a_hit_that_would_lack_something_is_refused():
    manager = make(("full", 20, FULL), ("sinks", 20, SlidingWindow(8, 4)), ("state", 4, STATE))
    whole = {0: [0, 1, 2, 3, 4], 1: [0, 3, 4], 2: [4]}
    for group, places in ((0, [1, 2, 3, 4]), (1, [3, 4]), (1, [0, 4]), (2, [])):
        with rejected(manager, ConfigError, "neither here nor brought"):
            restore(manager, run(0, 20), 5, {**whole, group: places})
    for group, places in ((0, [0, 1, 2, 4, 3]), (1, [0, 3, 4, 5]), (0, [0, 0, 1, 2, 3, 4])):
        with rejected(manager, ConfigError, "rise"):
            restore(manager, run(0, 20), 5, {**whole, group: places})
    with rejected(manager, ConfigError, "only the state at the end"):
        restore(manager, run(0, 20), 5, {**whole, 2: [3, 4]})
    with rejected(manager, ConfigError, "layer group 3"):
        restore(manager, run(0, 20), 5, {**whole, 3: [4]})
    with rejected(manager, ConfigError, "6 blocks of 4 of a prompt of 21 tokens"):
        restore(manager, run(0, 21), 6, whole)
    with restore(manager, run(0, 20), 5, whole) as restored:
        restored.commit()
        with pytest.raises(SequenceError):
            restored.commit()
    with pytest.raises(SequenceError):
        restored.commit()
    with rejected(manager, ConfigError, "finds 5 blocks already"):
        restore(manager, run(0, 20), 5, {})


def test_a_restore_is_refused_until_planned_copies_are_done():
    manager = make(("full", 20, FULL))
    serve(manager, run(0, 16))
    seq = manager.open([*range(6), 99])
    manager.reserve(seq, 1)
    with rejected(manager, CopyError, "take_copies"):
        restore(manager, run(1000, 8), 2, {0: [0, 1]})
    manager.take_copies()
    manager.close(seq)
    assert bring(manager, run(1000, 8)) == {0: [0, 1]}


def test_blocks_that_are_restored_and_computed_at_once_are_kept_once():
    manager = make(("full", 20, FULL), ("sliding", 20, SLIDING), ("state", 6, STATE))
    brought = {0: [0, 1, 2, 3], 1: [2, 3], 2: [3]}
    with restore(manager, run(0, 16), 4, brought) as restored:
        serve_in_pieces(manager, run(0, 17))
        restored.commit()
        ops.check(manager)
    assert found(manager, run(0, 16)) == 16
    assert manager.pools[0].num_cached == 4
    assert conserved(manager)


def test_a_restore_adds_a_node_and_lengthens_no_leaf():
    manager = make(("full", 20, FULL), ("sliding", 20, SLIDING))
    with restore(manager, run(0, 16), 4, {0: [0, 1, 2, 3], 1: [2, 3]}) as restored:
        serve(manager, run(0, 9))
        restored.commit()
    assert [node.end for node in manager.kernel.tree.nodes()] == [2, 4]
    assert [found(manager, run(0, length)) for length in (8, 12, 16)] == [8, 12, 16]
    assert conserved(manager)


def test_held_blocks_stay_when_their_sequence_is_closed_until_they_are_let_go():
    manager = make(("full", 8, FULL))
    seq = manager.open(run(0, 17))
    manager.reserve(seq, 17)
    manager.commit(seq, run(0, 17))
    let_go = hold(manager, seq)
    manager.close(seq)
    ops.check(manager)
    with pytest.raises(OutOfBlocks):
        serve(manager, run(1000, 20))
    serve(manager, run(1000, 16))
    assert manager.probe(run(0, 17)).num_blocks == 4
    assert manager.probe(run(0, 9)).num_blocks == 2, "a request may cut what is held"
    serve(manager, [*run(0, 8), 9])
    let_go()
    ops.check(manager)
    serve(manager, run(2000, 32))
    assert manager.probe(run(0, 17)).num_blocks == 0
    with pytest.raises(SequenceError):
        hold(manager, seq)


@pytest.mark.parametrize("kind", [FULL, SLIDING, ChunkedAttention(12), STATE])
def test_evicted_blocks_are_told_with_their_names_and_nothing_else_is(kind):
    manager = make(("full", 8, FULL), ("other", 9, kind), watchers=watchers(evictions=True))
    serve_in_pieces(manager, run(0, 25))
    assert take_evicted(manager) == []
    serve_in_pieces(manager, run(1000, 25))
    told = take_evicted(manager)
    names = block_hashes(run(0, 24), 4)
    full = [each.digest for each in told if each.group == 0]
    assert len(full) >= 5
    assert set(full) <= set(names)
    other = {each.digest for each in told if each.group == 1}
    assert other <= set(names) | set(block_hashes(run(1000, 24), 4))
    assert other, "the other group made room as well, with its leaf"
    assert take_evicted(manager) == []
    ops.invalidate(manager)
    ops.clear(manager)
    assert take_evicted(manager) == [], "what callers drop has not made room"


def test_a_manager_that_was_not_asked_remembers_no_evictions():
    manager = make(("full", 4, FULL))
    serve(manager, run(0, 16))
    serve(manager, run(1000, 16))
    assert manager.stats.evicted_blocks
    assert take_evicted(manager) == []


@pytest.mark.parametrize("num_blocks", [3, 4, 5])
def test_a_restore_needs_no_room_for_blocks_that_a_running_sequence_holds(num_blocks):
    manager = make(("sliding", num_blocks, SlidingWindow(10)), ("state", 8, STATE))
    prefill(manager, run(0, 12))
    here = residency(manager, [*run(0, 8), 0, 0])
    assert (here.matched, here.accepted, here.room) == (2, 0, (num_blocks - 3, 7))
    with restore(manager, run(0, 8), 2, {1: [1]}) as restored:
        restored.commit()
    ops.check(manager)
    assert found(manager, run(0, 8)) == 8


@pytest.mark.parametrize("media", [np.array([]), {}, "x"])
def test_hashes_refuse_media_that_are_no_list(media):
    with pytest.raises(MediaError, match="list or tuple"):
        block_hashes([1, 2], 2, None, media)
