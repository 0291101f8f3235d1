"""A radix cache with sliding windows and multimodal namespaces, feature by feature, in quire.

matching     page by page; namespaces for tenants, adapters, images
hashes       a SHA-256 per page that knows its position, and what is before it
eviction     leaves only, oldest first; windows go before prefixes do
locks        a running request holds its whole path, in a windowed group the window alone
sizes        evictable, protected and total, for each group
callbacks    what was stored and what was evicted, in order
reset        everything unlocked goes, and that is told
printout     the tree, drawn
"""

import hashlib

import numpy as np
import pytest
from ancestors_help import BLOCK, Engine, counts, run

from quire import CacheManager, LayerGroup, MediaItem, Scope, SlidingWindow, block_hashes
from quire.core import AllBlocksCleared, BlockRemoved, BlockStored
from quire.errors import OutOfBlocks

WINDOW = 8


@pytest.fixture
def manager():
    return CacheManager(num_blocks=16, block_size=BLOCK, sub_block=False, events=True)


@pytest.fixture
def hybrid():
    """Full attention beside a sliding window of two blocks, which has less memory."""
    groups = [
        LayerGroup("full", 32),
        LayerGroup("sliding", 12, SlidingWindow(WINDOW, interval=2 * WINDOW)),
    ]
    return CacheManager(groups=groups, block_size=BLOCK, sub_block=False)


def found(manager, tokens, scope=None, **options):
    """Return how many tokens of `tokens` a longer prompt finds."""
    return manager.probe([*tokens, 2**31 - 1], scope, **options).num_tokens


# -- matching ------------------------------------------------------------------------------


def test_a_match_ends_at_a_page_boundary(manager):
    Engine(manager).serve(run(0, 12))
    assert [found(manager, run(0, n)) for n in (3, 4, 7, 8, 11, 12)] == [0, 4, 4, 8, 8, 12]
    assert found(manager, [*run(0, 6).tolist(), 99, 99]) == 4


def test_a_match_of_every_token_leaves_one_to_compute(manager):
    engine = Engine(manager)
    engine.serve(run(0, 12))
    seq = manager.open(run(0, 12))
    assert seq.num_cached == 8
    assert manager.probe(run(0, 13)).num_tokens == 12


def test_a_lookup_changes_nothing(manager):
    Engine(manager).serve(run(0, 12))
    before = manager.snapshot()
    found(manager, run(0, 6))
    manager.explain(run(0, 6))
    assert manager.snapshot() == before


# -- namespaces ----------------------------------------------------------------------------


@pytest.mark.parametrize("other", [Scope(salt="b"), Scope(lora="a"), Scope(model="a"), None])
def test_namespaces_share_nothing(manager, other):
    engine = Engine(manager)
    engine.serve(run(0, 12), Scope(salt="a"))
    assert found(manager, run(0, 12), Scope(salt="a")) == 12
    assert found(manager, run(0, 12), other) == 0
    assert manager.explain(run(0, 12), other).found_in == [(Scope(salt="a"), 12)]


def image(name, start=4, length=6):
    """Return an image's span: as many placeholder tokens, and what its pixels hash to."""
    return MediaItem(hashlib.sha256(name).digest(), start, length)


def test_pages_of_one_image_are_shared_and_those_of_another_are_not(manager):
    prompt = [1, 2, 3, 4, *[9] * 6, 5, 6]
    cat, dog = [image(b"cat")], [image(b"dog")]
    Engine(manager).serve(prompt, media=cat)
    assert found(manager, prompt, media=cat) == 12
    assert found(manager, prompt, media=dog) == 4
    assert found(manager, prompt) == 4
    moved = [1, 2, 3, 4, 5, *[9] * 6, 6]
    assert found(manager, moved, media=[image(b"cat", start=5)]) == 4


# -- hashes --------------------------------------------------------------------------------


def test_a_page_hash_is_sha256_over_the_page_before_and_its_tokens():
    first, second = block_hashes(run(0, 8), BLOCK)
    assert second == hashlib.sha256(first + np.arange(4, 8, dtype="<i4").tobytes()).digest()


def test_equal_pages_at_other_positions_have_other_hashes():
    first, second, third = block_hashes([1, 2, 3, 4] * 3, BLOCK)
    assert len({first, second, third}) == 3
    assert block_hashes([1, 2, 3, 4, 7], BLOCK) == [first]


def test_the_hash_of_a_page_knows_all_before_it_the_namespace_and_the_image():
    last = [
        block_hashes(tokens, BLOCK, scope, media)[-1]
        for tokens, scope, media in (
            (run(0, 12), None, ()),
            ([77, *run(1, 11).tolist()], None, ()),
            (run(0, 12), Scope(salt="a"), ()),
            (run(0, 12), Scope(lora="a"), ()),
            (run(0, 12), None, (image(b"cat"),)),
            (run(0, 12), None, (image(b"dog"),)),
        )
    ]
    assert len(set(last)) == 6


# -- eviction ------------------------------------------------------------------------------


def test_leaves_are_evicted_from_their_tails_and_a_parent_after_its_children(manager):
    engine = Engine(manager)
    system = run(0, 8).tolist()
    old, new = [*system, *range(100, 108)], [*system, *range(200, 208)]
    engine.serve(old)
    engine.serve(new)
    left = []
    while manager.reclaim(1):
        left.append((found(manager, old), found(manager, new)))
    assert left == [(12, 16), (8, 16), (8, 12), (8, 8), (4, 4), (0, 0)]


def test_a_window_is_evicted_where_it_is_missed_least_and_the_prefix_stays(hybrid):
    Engine(hybrid).serve(run(0, 32))
    lengths = range(4, 33, 4)
    assert [n for n in lengths if found(hybrid, run(0, n)) == n] == list(lengths)
    assert hybrid.reclaim(4, group=1) == 4
    assert [n for n in lengths if found(hybrid, run(0, n)) == n] == [16, 32]
    assert counts(hybrid, 0) == (24, 0, 8)
    assert counts(hybrid, 1) == (8, 0, 4)
    hit = hybrid.probe(run(0, 13))
    assert (hit.num_tokens, hit.reason) == (0, "window")


def test_pages_that_a_window_lost_come_back_when_they_are_computed_again(hybrid):
    engine = Engine(hybrid)
    engine.serve(run(0, 32))
    hybrid.reclaim(4, group=1)
    assert found(hybrid, run(0, 8)) == 0
    engine.serve(run(0, 8))
    assert found(hybrid, run(0, 8)) == 8
    assert counts(hybrid, 0) == (24, 0, 8)


# -- locks ---------------------------------------------------------------------------------


def test_a_running_request_locks_its_path_and_in_a_windowed_group_its_window(hybrid):
    seq = Engine(hybrid).prefill(run(0, 24))
    assert counts(hybrid, 0) == (26, 6, 0)
    assert counts(hybrid, 1) == (6, 2, 4)
    assert seq.block_ids(1)[:4].tolist() == [-1] * 4
    hybrid.close(seq)
    assert counts(hybrid, 0) == (26, 0, 6)
    assert counts(hybrid, 1) == (6, 0, 6)


def test_a_prefix_is_locked_and_unlocked_by_hand(hybrid):
    engine = Engine(hybrid)
    engine.serve(run(0, 24))
    with hybrid.pin(run(0, 24)) as lock:
        assert lock.num_tokens == 24
        assert (counts(hybrid, 0)[1], counts(hybrid, 1)[1]) == (6, 2)
        hybrid.reclaim(32)
        hybrid.reclaim(12, group=1)
        assert (counts(hybrid, 0), counts(hybrid, 1)) == ((26, 6, 0), (10, 2, 0))
        assert found(hybrid, run(0, 24)) == 24
    assert (counts(hybrid, 0)[1], counts(hybrid, 1)[1]) == (0, 0)
    assert hybrid.reclaim(32) == 6


def test_locks_are_counted(manager):
    engine = Engine(manager)
    first = engine.prefill(run(0, 8))
    second = engine.prefill(run(0, 9))
    assert counts(manager) == (13, 3, 0)
    manager.close(first)
    assert manager.reclaim(16) == 0
    manager.close(second)
    assert manager.reclaim(16) == 2


def test_a_window_slides_through_memory_much_smaller_than_the_text(hybrid):
    engine = Engine(hybrid)
    seq = engine.prefill(run(0, 8))
    for token in range(110):
        engine.compute(seq, [token])
        assert engine.reads_its_own(seq, group=1, window=WINDOW)
    assert engine.reads_its_own(seq)
    assert seq.num_blocks == 30 > hybrid.pools[1].num_blocks


def test_what_is_locked_is_never_evicted_and_a_request_without_room_is_refused(manager):
    engine = Engine(manager)
    seq = engine.prefill(run(0, 40))
    other = manager.open(run(1000, 28))
    with pytest.raises(OutOfBlocks, match="7 blocks of group 'full' needed; of its 16 blocks 6"):
        manager.reserve(other, 28)
    assert engine.reads_its_own(seq)


# -- sizes ---------------------------------------------------------------------------------


def test_evictable_protected_and_total_sizes_add_up_in_every_group(hybrid):
    engine = Engine(hybrid)
    engine.serve(run(1000, 16))
    engine.prefill(run(0, 24))
    sizes = [(g.num_cached, g.num_active, g.num_free, g.num_blocks) for g in hybrid.pools]
    assert sizes == [(4, 6, 22, 32), (8, 2, 2, 12)]
    assert counts(hybrid, 0) == (22, 6, 4)
    assert counts(hybrid, 1) == (2, 2, 8)


# -- callbacks -----------------------------------------------------------------------------


def test_every_eviction_is_told_with_its_hashes_and_reason(manager):
    engine = Engine(manager)
    engine.serve(run(0, 12))
    names = block_hashes(run(0, 12), BLOCK)
    (stored,) = manager.take_events()
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_hash) == (names, None)
    assert stored.token_ids == list(range(12))
    told = []
    manager.reclaim(2)
    manager.evict(run(0, 4))
    for event in manager.take_events():
        assert isinstance(event, BlockRemoved)
        told.append((event.block_hashes, event.reason))
    assert told == [([names[2], names[1]], "evicted"), ([names[0]], "invalidated")]
    assert manager.take_events() == []


def test_who_hears_every_event_knows_what_can_be_found(manager):
    engine = Engine(manager)
    known = set()
    for start in (0, 1000, 0, 2000, 3000, 1000, 0, 4000):
        engine.serve([*run(0, 4).tolist(), *run(start, 17).tolist()])
        for event in manager.take_events():
            if isinstance(event, BlockStored):
                known.update(event.block_hashes)
            else:
                known.difference_update(event.block_hashes)
        for other in (0, 1000, 2000, 3000, 4000):
            prompt = [*run(0, 4).tolist(), *run(other, 16).tolist()]
            pages = sum(name in known for name in block_hashes(prompt, BLOCK))
            assert found(manager, prompt) == pages * BLOCK
    assert manager.stats.evicted_blocks > 0


# -- reset and printout --------------------------------------------------------------------


def test_reset_drops_everything_unlocked_and_tells_it(manager):
    engine = Engine(manager)
    engine.serve(run(0, 12))
    engine.serve(run(1000, 12), Scope(salt="a"))
    seq = engine.prefill(run(2000, 8))
    assert manager.clear() == 6
    assert counts(manager) == (14, 2, 0)
    assert engine.reads_its_own(seq)
    manager.close(seq)
    manager.take_events()
    assert manager.clear() == 2
    assert isinstance(manager.take_events()[-1], AllBlocksCleared)
    assert counts(manager) == (16, 0, 0)


def test_the_tree_is_drawn_with_its_pages_and_locks(manager):
    engine = Engine(manager)
    system = run(0, 8).tolist()
    engine.serve([*system, *range(100, 108)])
    engine.prefill([*system, *range(200, 205)], priority=2)
    picture = manager.dump().splitlines()
    assert picture[1:-1] == [
        "Scope()",
        "└── 2 blocks, tokens 0-8: [0, 1, 2, 3, 4, 5, ...]  1 ref, priority 2",
        "    ├── 2 blocks, tokens 8-16: [100, 101, 102, 103, 104, 105, ...]  cached",
        "    └── 1 blocks, tokens 8-12: [200, 201, 202, 203, ...]  1 ref, priority 2",
        "sequence 0 open: 12 published <= 13 computed <= 13 capacity",
    ]
    assert "4 active # 2 cached + 10 free . of 16 blocks of 4 tokens" in picture[0]


def test_the_drawing_says_what_a_window_has_dropped(hybrid):
    Engine(hybrid).serve(run(0, 24))
    hybrid.reclaim(3, group=1)
    (node,) = [line for line in hybrid.dump().splitlines() if "tokens 0-24" in line]
    assert node.endswith("cached, sliding 3/6")
