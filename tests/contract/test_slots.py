"""`SlotCache`: its hits, its victims, and its copies."""

import numpy as np
from slots_help import found, prefill, rejected, serve, text

from quire import errors
from quire.core import MediaItem
from quire.slots import SlotCache, SlotCopy, check, snapshot

# -- finding -------------------------------------------------------------------------------


def test_a_prefix_is_found_at_every_depth():
    cache = SlotCache(2, 64)
    tokens = text(0, 40)
    slot = serve(cache, tokens)
    for depth in range(1, 40):
        prompt = [*tokens[:depth], 9999]
        assert cache.find(prompt) == (depth, slot, cache.generation(slot))
    assert cache.find([9999, 1]) is None


def test_the_last_token_of_a_prompt_is_always_computed():
    cache = SlotCache(2, 64)
    serve(cache, text(0, 40))
    assert cache.find(text(0, 40)).num_tokens == 39
    assert cache.open(text(0, 40)).num_cached == 39


def test_a_free_slot_that_holds_the_prefix_is_taken_over_without_a_copy():
    cache = SlotCache(4, 64)
    slot = serve(cache, text(0, 20))
    for start in (1000, 2000):
        serve(cache, text(start, 20))
    handle = cache.open([*text(0, 20), 7, 8])
    assert (handle.slot, handle.num_cached) == (slot, 20)
    assert cache.take_copies() == []
    assert (cache.stats.hit_tokens, cache.stats.copied_tokens) == (20, 0)


def test_the_next_turn_of_a_chat_keeps_its_slot_and_computes_only_what_is_new():
    cache = SlotCache(3, 512)
    talk, slots = list(range(50)), set()
    for turn in range(8):
        handle = prefill(cache, talk)
        assert handle.num_cached == max(len(talk) - 20, 0) if turn else handle.num_cached == 0
        cache.commit(handle, text(1000 * (turn + 1), 10))
        cache.close(handle)
        slots.add(handle.slot)
        talk += [*text(1000 * (turn + 1), 10), *text(1000 * (turn + 1) + 500, 20)]
    assert len(slots) == 1
    assert cache.stats.copied_tokens == 0


def test_a_prefix_in_a_busy_slot_is_copied_into_another():
    cache = SlotCache(3, 64)
    first = prefill(cache, text(0, 20))
    second = cache.open([*text(0, 12), 7, 8])
    assert second.slot != first.slot
    assert second.num_cached == second.computed == 12
    assert cache.take_copies() == [SlotCopy(src=first.slot, dst=second.slot, num_tokens=12)]
    assert first.computed == 20


def test_a_copy_leaves_out_what_its_slot_holds_already():
    cache = SlotCache(2, 64)
    system = text(0, 30)
    serve(cache, [*system, *text(1000, 10)])
    running = prefill(cache, [*system, *text(2000, 10)])
    before = cache.stats.copied_tokens
    branch = cache.open([*system, *text(2000, 8), 7])
    assert branch.num_cached == 38
    assert cache.take_copies() == [SlotCopy(running.slot, branch.slot, 38, start=30)]
    assert cache.stats.copied_tokens - before == 8


def test_the_long_rest_of_a_free_slot_is_kept_by_copying_its_head():
    cache = SlotCache(4, 4096)
    slot = serve(cache, text(0, 3000))
    branch = cache.open([*text(0, 1000), 7])
    assert branch.slot != slot
    assert cache.take_copies() == [SlotCopy(slot, branch.slot, 1000)]
    assert found(cache, text(0, 3000)) == 3000


def test_a_rest_that_costs_less_than_the_copy_is_overwritten():
    cache = SlotCache(4, 4096, copy_ratio=100)
    slot = serve(cache, text(0, 1010))
    branch = cache.open([*text(0, 1000), 7])
    assert branch.slot == slot
    assert cache.take_copies() == []
    assert found(cache, text(0, 1010)) == 1000


def test_pictures_with_equal_placeholders_do_not_share():
    cache = SlotCache(4, 64)
    prompt = [1, 2, *[0] * 6, 3, 4, 5]
    cat, dog = (MediaItem(digest * 32, 2, 6) for digest in (b"c", b"d"))
    serve(cache, prompt, media=[cat])
    assert found(cache, prompt, media=[cat]) == len(prompt)
    assert found(cache, prompt, media=[dog]) == 2
    assert found(cache, prompt) == 2


def test_pictures_that_no_slot_holds_are_forgotten(monkeypatch):
    monkeypatch.setattr("quire.slots.prompts.MAX_SLOT_MEDIA", 4)
    cache = SlotCache(1, 64)
    for n in range(200):
        serve(cache, [1, 0, 0, 2], media=[MediaItem(bytes([n]) * 32, 1, 2)])
        check(cache)
    assert len(cache.media) < 16


# -- which slot ----------------------------------------------------------------------------


def test_a_slot_with_a_reusable_prefix_is_not_recycled():
    cache = SlotCache(17, 64)
    hits = 0
    for turn in range(19):
        hits += prefill_and_close(cache, [*text(0, 30), 5000 + turn]) > 0
        serve(cache, text(10_000 + 1000 * turn, 30))
    assert hits == 18


def prefill_and_close(cache, tokens):
    handle = prefill(cache, tokens)
    cache.close(handle)
    return handle.num_cached


def test_empty_slots_go_first_then_duplicates_then_the_least_recently_used():
    cache = SlotCache(4, 64)
    old, twin = prefill(cache, text(0, 10)), prefill(cache, text(1000, 10))
    copy = cache.fork(twin)
    cache.take_copies()
    for handle in (old, twin, copy):
        cache.close(handle)
    taken = [cache.allocate().slot for _ in range(4)]
    assert taken[0] not in (old.slot, twin.slot, copy.slot)
    assert taken[1:] == [twin.slot, old.slot, copy.slot]


def test_a_slot_whose_twin_is_gone_is_worth_keeping_again():
    cache = SlotCache(3, 64)
    twin = prefill(cache, text(0, 10))
    copy = cache.fork(twin)
    cache.take_copies()
    cache.close(twin)
    cache.free(copy)
    cache.close(cache.allocate())
    serve(cache, text(1000, 10))
    assert found(cache, text(0, 10)) == 10


def test_a_prefix_that_is_copied_from_counts_as_used():
    cache = SlotCache(3, 4096)
    shared = serve(cache, text(0, 2000))
    serve(cache, text(5000, 10))
    branch = prefill(cache, [*text(0, 1000), 7])
    assert branch.slot != shared
    cache.allocate()
    assert found(cache, text(0, 2000)) == 2000


def test_two_caches_with_the_same_calls_make_the_same_decisions():
    caches = [SlotCache(3, 64) for _ in range(2)]
    for cache in caches:
        rng = np.random.default_rng(3)
        for _ in range(60):
            serve(cache, rng.integers(0, 2, rng.integers(1, 20)).astype(np.int32))
    assert snapshot(caches[0]) == snapshot(caches[1])


def test_every_slot_busy_is_an_error_that_says_so():
    cache = SlotCache(2, 64)
    handles = [prefill(cache, text(1000 * n, 10)) for n in range(2)]
    for call in (lambda: cache.open([1]), cache.allocate, lambda: cache.fork(handles[0])):
        with rejected(
            cache, errors.OutOfSlots, "2 slots 2 are busy and 0 more are pinned"
        ) as caught:
            call()
        assert (caught.value.num_slots, caught.value.busy, caught.value.pinned) == (2, 2, 0)
    cache.close(handles[0])
    assert cache.open([1]).slot == handles[0].slot


# -- copies --------------------------------------------------------------------------------


def test_a_source_may_be_given_away_before_the_copy_is_taken():
    cache = SlotCache(2, 64)
    first = prefill(cache, text(0, 20))
    branch = cache.open([*text(0, 10), 7])
    cache.close(first)
    other = cache.open([5000])
    assert other.slot == first.slot
    assert cache.take_copies() == [SlotCopy(first.slot, branch.slot, 10)]


def test_a_copy_of_a_copy_that_was_not_done_reads_the_first_source():
    cache = SlotCache(3, 64)
    first = prefill(cache, text(0, 20))
    second = cache.open([*text(0, 10), 7])
    third = cache.fork(second)
    assert cache.take_copies() == [
        SlotCopy(first.slot, second.slot, 10),
        SlotCopy(first.slot, third.slot, 10),
    ]


def test_a_planned_copy_of_a_prefix_is_not_found_before_it_is_taken():
    cache = SlotCache(2, 64)
    first = prefill(cache, text(0, 20))
    second = cache.open([*text(0, 10), 7])
    cache.close(second)
    third = cache.open([*text(0, 15), 7])
    assert third.slot == second.slot
    assert cache.take_copies() == [SlotCopy(first.slot, third.slot, 15, start=0)]


def test_a_slot_that_gets_its_own_unharmed_memory_back_needs_no_copy():
    cache = SlotCache(2, 64)
    first = prefill(cache, text(0, 20))
    second = cache.open([*text(0, 10), 7])
    cache.close(first)
    cache.close(cache.open([5000]))
    third = cache.open([*text(0, 10), 8])
    assert (third.slot, third.num_cached) == (first.slot, 10)
    assert cache.take_copies() == [SlotCopy(first.slot, second.slot, 10)]


def test_a_slot_that_gives_up_its_copied_prefix_needs_no_copy():
    cache = SlotCache(2, 64)
    prefill(cache, text(0, 20))
    branch = cache.open([*text(0, 10), 7])
    cache.truncate(branch, 4)
    assert [copy.num_tokens for copy in cache.contents.copies.waiting.values()] == [4]
    cache.free(branch)
    assert cache.take_copies() == []


def test_a_commit_before_the_copies_were_taken_is_refused():
    cache = SlotCache(2, 64)
    first = prefill(cache, text(0, 20))
    branch = cache.open([*text(0, 10), 7])
    with rejected(cache, errors.CopyError, "take_copies"):
        cache.commit(branch, [7])
    cache.truncate(first, 5)
    with rejected(cache, errors.CopyError, "take_copies"):
        cache.commit(first, text(5, 1))
    cache.take_copies()
    cache.commit(branch, [7])
    cache.commit(first, text(5, 1))
