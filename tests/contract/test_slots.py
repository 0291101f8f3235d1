"""What `SlotCache` promises, one behaviour per test; failure cases of slots by their number."""

from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from quire import errors
from quire.core import MediaItem, Scope, SlotCache, SlotCopy


def text(start, num_tokens):
    """Return `num_tokens` token ids that no other `start` (a multiple of 1000) shares."""
    return np.arange(start, start + num_tokens, dtype=np.int32)


def prefill(cache, tokens, scope=None, **options):
    """Open a prompt, do its copies and commit the rest; return the open handle."""
    handle = cache.open(tokens, scope, **options)
    cache.take_copies()
    cache.commit(handle, tokens[handle.num_cached :])
    return handle


def serve(cache, tokens, scope=None, **options):
    """Prefill a prompt and close it; return its slot."""
    handle = prefill(cache, tokens, scope, **options)
    cache.close(handle)
    return handle.slot


def found(cache, tokens, scope=None, **options):
    """Return how many tokens of `tokens` a longer prompt would find."""
    match = cache.find([*tokens, 2**31 - 1], scope, **options)
    return match.num_tokens if match else 0


@contextmanager
def rejected(cache, error, *mentions):
    """Expect `error` with these texts in its message, and a state that did not change."""
    before = msgspec.msgpack.encode(cache.snapshot())
    with pytest.raises(error) as caught:
        yield caught
    assert msgspec.msgpack.encode(cache.snapshot()) == before
    cache.check()
    for mention in mentions:
        assert str(mention) in str(caught.value), f"{mention!r} is not in {caught.value}"


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
    assert cache.stats.reoccupied_slots == 1


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


def test_what_a_running_request_commits_is_found_at_once():
    cache = SlotCache(3, 64)
    first = prefill(cache, text(0, 20))
    cache.commit(first, [500])
    cache.commit(first, [501])
    assert found(cache, [*text(0, 20), 500, 501]) == 22


def test_nothing_is_found_before_it_was_computed():
    cache = SlotCache(3, 64)
    handle = cache.open(text(0, 20))
    assert found(cache, text(0, 20)) == 0
    cache.close(handle)
    assert found(cache, text(0, 20)) == 0


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


def test_scopes_do_not_share():
    cache = SlotCache(8, 64)
    for scope in (Scope(salt="a"), Scope(lora="a"), Scope(salt="a", lora="b")):
        assert prefill(cache, text(0, 20), scope).num_cached == 0
    assert found(cache, text(0, 20), Scope(salt="ab")) == 0
    assert found(cache, text(0, 20), Scope(salt="a")) == 20


def test_pictures_with_equal_placeholders_do_not_share():
    cache = SlotCache(4, 64)
    prompt = [1, 2, *[0] * 6, 3, 4, 5]
    cat, dog = (MediaItem(digest * 32, 2, 6) for digest in (b"c", b"d"))
    serve(cache, prompt, media=[cat])
    assert found(cache, prompt, media=[cat]) == len(prompt)
    assert found(cache, prompt, media=[dog]) == 2
    assert found(cache, prompt) == 2


def test_a_request_reads_its_placeholder_tokens_back():
    cache = SlotCache(4, 64)
    prompt = [1, 2, *[0] * 6, 3]
    handle = prefill(cache, prompt, media=[MediaItem(b"c" * 32, 2, 6)])
    cache.commit(handle, [77])
    assert handle.tokens.tolist() == [*prompt, 77]


def test_pictures_that_no_slot_holds_are_forgotten(monkeypatch):
    monkeypatch.setattr("quire.core.slot_store.MAX_MEDIA", 4)
    cache = SlotCache(1, 64)
    for n in range(200):
        serve(cache, [1, 0, 0, 2], media=[MediaItem(bytes([n]) * 32, 1, 2)])
        cache.check()
    assert len(cache.media) < 16


# -- which slot ----------------------------------------------------------------------------


def test_case_04_the_slot_that_is_worth_something_is_not_recycled():
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
    assert caches[0].snapshot() == caches[1].snapshot()


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


def test_a_prefix_that_was_planned_but_not_copied_does_not_count_as_there():
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


def test_the_same_tokens_of_another_scope_do_not_count_as_there():
    cache = SlotCache(2, 64)
    other = serve(cache, text(0, 20), Scope(salt="x"))
    first = prefill(cache, text(0, 20))
    second = cache.open([*text(0, 10), 7])
    assert second.slot == other
    assert cache.take_copies() == [SlotCopy(first.slot, second.slot, 10, start=0)]


def test_a_slot_that_gives_up_its_copied_prefix_needs_no_copy():
    cache = SlotCache(2, 64)
    prefill(cache, text(0, 20))
    branch = cache.open([*text(0, 10), 7])
    cache.truncate(branch, 4)
    assert [copy.num_tokens for copy in cache.copies.waiting.values()] == [4]
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


def test_taking_the_copies_empties_the_plan():
    cache = SlotCache(2, 64)
    prefill(cache, text(0, 20))
    cache.open([*text(0, 10), 7])
    assert len(cache.take_copies()) == 1
    assert cache.take_copies() == []


# -- requests ------------------------------------------------------------------------------


def test_a_fork_continues_on_its_own():
    cache = SlotCache(3, 64)
    handle = prefill(cache, text(0, 20))
    twin = cache.fork(handle)
    assert cache.take_copies() == [SlotCopy(handle.slot, twin.slot, 20)]
    cache.commit(handle, [500])
    cache.commit(twin, [600])
    assert handle.tokens.tolist() == [*range(20), 500]
    assert twin.tokens.tolist() == [*range(20), 600]


def test_a_fork_within_the_prompt_still_has_to_compute_it():
    cache = SlotCache(3, 64)
    handle = cache.open(text(0, 20))
    cache.commit(handle, text(0, 5))
    twin = cache.fork(handle)
    cache.take_copies()
    with rejected(cache, errors.CommitError, "position 5"):
        cache.commit(twin, [999])
    cache.commit(twin, text(5, 15))


def test_truncate_rejects_speculated_tokens_exactly():
    cache = SlotCache(2, 64)
    handle = prefill(cache, text(0, 20))
    cache.commit(handle, [500, 501, 502])
    cache.truncate(handle, 21)
    assert handle.tokens.tolist() == [*range(20), 500]
    cache.commit(handle, [600])
    assert found(cache, [*range(20), 500, 600]) == 22
    assert found(cache, [*range(20), 500, 501]) == 21


def test_after_a_truncation_within_the_prompt_the_prompt_comes_again():
    cache = SlotCache(2, 64)
    serve(cache, text(0, 15))
    handle = prefill(cache, text(0, 20))
    cache.truncate(handle, 3)
    with rejected(cache, errors.CommitError, "position 10"):
        cache.commit(handle, [*range(3, 10), 999])
    cache.commit(handle, [*range(3, 20), 999])


def test_a_commit_of_other_tokens_than_the_prompts_is_refused():
    cache = SlotCache(2, 64)
    handle = cache.open(text(0, 20))
    with rejected(cache, errors.CommitError, "position 4"):
        cache.commit(handle, [0, 1, 2, 3, 99])


def test_free_forgets_what_the_request_computed():
    cache = SlotCache(2, 64)
    cache.free(prefill(cache, text(0, 20)))
    assert found(cache, text(0, 20)) == 0
    assert cache.num_free == 2


def test_clear_forgets_all_but_running_requests_and_pins():
    cache = SlotCache(3, 64)
    prefill(cache, text(0, 20))
    for start in (1000, 2000):
        serve(cache, text(start, 20))
    cache.pin(text(1000, 5))
    cache.clear()
    assert [found(cache, text(start, 20)) for start in (0, 1000, 2000)] == [20, 5, 0]


# -- slots as an allocator -----------------------------------------------------------------


def test_slots_can_be_taken_and_given_back_by_hand():
    cache = SlotCache(3, 64)
    handles = [cache.allocate() for _ in range(3)]
    assert sorted(handle.slot for handle in handles) == [0, 1, 2]
    assert (cache.num_free, cache.num_busy) == (0, 3)
    cache.free(handles[1])
    assert cache.is_free(handles[1].slot)
    assert cache.allocate().slot == handles[1].slot


def test_what_find_names_can_be_occupied():
    cache = SlotCache(3, 64)
    serve(cache, text(0, 20))
    match = cache.find([*text(0, 12), 7])
    handle = cache.occupy(match.slot, match.generation)
    assert handle.computed == 20
    cache.truncate(handle, match.num_tokens)
    cache.commit(handle, [7])
    assert handle.tokens.tolist() == [*range(12), 7]


def test_a_generation_rises_when_content_is_lost_and_only_then():
    cache = SlotCache(1, 64)
    handle = prefill(cache, text(0, 20))
    first = cache.generation(0)
    cache.commit(handle, [500])
    cache.close(handle)
    handle = cache.open([*text(0, 20), 500, 7])
    assert cache.generation(0) == handle.generation == first
    cache.commit(handle, [7])
    cache.truncate(handle, 21)
    cache.close(handle)
    assert cache.generation(0) > first
    with rejected(cache, errors.StaleSlot, f"not {first}"):
        cache.occupy(0, first)


def test_case_05_every_misuse_raises_and_changes_nothing():
    cache = SlotCache(2, 64)
    busy, done = prefill(cache, text(0, 10)), prefill(cache, text(1000, 10))
    cache.close(done)
    foreign = SlotCache(2, 64).open([1])
    with rejected(cache, errors.SlotError, f"slot {busy.slot} is busy"):
        cache.occupy(busy.slot)
    for unknown in (-1, 2, 1.0, "0", True, None):
        for call in (cache.occupy, cache.is_free, cache.generation):
            with rejected(cache, errors.SlotError, repr(unknown), "0 to 1"):
                call(unknown)
    for call in (cache.close, cache.free, cache.fork, lambda h: cache.commit(h, [1]),
                 lambda h: cache.truncate(h, 0)):  # fmt: skip
        with rejected(cache, errors.SlotError, "closed already"):
            call(done)
        with rejected(cache, errors.SlotError, "another SlotCache"):
            call(foreign)
        with rejected(cache, errors.SlotError, "handle"):
            call(busy.slot)
    assert (cache.num_free, cache.num_busy) == (1, 1)


def test_a_handle_closed_before_its_slot_was_given_away_cannot_reach_the_new_request():
    cache = SlotCache(1, 64)
    old = prefill(cache, text(0, 10))
    cache.close(old)
    new = cache.open([*text(0, 10), 7])
    assert (old.slot, old.generation) == (new.slot, new.generation)
    with rejected(cache, errors.SlotError, "closed already"):
        cache.close(old)
    assert not cache.is_free(new.slot)


# -- limits and bad input ------------------------------------------------------------------


def test_a_slot_holds_max_tokens_and_not_one_more():
    cache = SlotCache(2, 16)
    with rejected(cache, errors.TokensError, 17, 16):
        cache.open(text(0, 17))
    handle = prefill(cache, text(0, 16))
    assert handle.room == 0
    with rejected(cache, errors.CommitError, 16):
        cache.commit(handle, [1])


@pytest.mark.parametrize(
    ("tokens", "mention"),
    [([], "empty"), ([[1, 2]], "1-D"), ([1.5], "integers"), ([-1], "-1"), ("ab", ""),
     (np.array([-5, 1], np.int32), "-5"), ([2**31], "range")],
)  # fmt: skip
def test_tokens_of_a_wrong_kind_are_refused(tokens, mention):
    cache = SlotCache(2, 16)
    for call in (cache.open, cache.find, cache.pin):
        with rejected(cache, errors.TokensError, mention):
            call(tokens)
    if len(tokens):
        handle = cache.allocate()
        with rejected(cache, errors.TokensError, mention):
            cache.commit(handle, tokens)


def test_scopes_and_media_of_a_wrong_kind_are_refused():
    cache = SlotCache(2, 16)
    for call in (cache.open, cache.find, cache.pin):
        with rejected(cache, errors.ScopeError, "tenant"):
            call([1, 2], "tenant")
        with rejected(cache, errors.MediaError):
            call([1, 2], media=[MediaItem(b"c" * 32, 1, 5)])
    with rejected(cache, errors.ScopeError, "tenant"):
        cache.allocate("tenant")


@pytest.mark.parametrize("bad", [-1, 11, 1.0, None, True])
def test_a_truncation_beyond_what_is_computed_is_refused(bad):
    cache = SlotCache(2, 16)
    handle = prefill(cache, text(0, 10))
    with rejected(cache, errors.TruncateError, repr(bad)):
        cache.truncate(handle, bad)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2", True, None])
def test_settings_that_cannot_work_are_refused(bad):
    for settings in ((bad, 16), (2, bad)):
        with pytest.raises(errors.ConfigError, match=r"num_slots|max_tokens"):
            SlotCache(*settings)
    with pytest.raises(errors.ConfigError, match="copy_ratio"):
        SlotCache(2, 16, copy_ratio=bad)


# -- pins ----------------------------------------------------------------------------------


def test_a_pinned_prefix_outlives_any_pressure():
    cache = SlotCache(2, 64)
    serve(cache, text(0, 20))
    with cache.pin(text(0, 20)) as pin:
        assert pin.num_tokens == 20
        for start in range(1000, 9000, 1000):
            serve(cache, text(start, 20))
        assert found(cache, text(0, 20)) == 20
    for start in (1000, 2000):
        serve(cache, text(start, 20))
    assert found(cache, text(0, 20)) == 0


def test_a_pinned_slot_serves_whoever_starts_with_what_is_pinned():
    cache = SlotCache(2, 64)
    slot = serve(cache, text(0, 20))
    cache.pin(text(0, 20))
    handle = cache.open([*text(0, 20), 7])
    assert handle.slot == slot
    with rejected(cache, errors.TruncateError, "pin keeps the first 20"):
        cache.truncate(handle, 19)
    cache.close(handle)
    branch = cache.open([*text(0, 10), 7])
    assert branch.slot != slot


def test_case_02_pins_on_every_slot_fail_fast():
    cache = SlotCache(2, 64)
    for start in (0, 1000):
        serve(cache, text(start, 20))
    pins = [cache.pin(text(start, 20)) for start in (0, 1000)]
    with rejected(cache, errors.OutOfSlots, "2 more are pinned"):
        cache.open([7, 8])
    pins[0].close()
    cache.open([7, 8])


def test_pins_of_one_slot_are_counted():
    cache = SlotCache(1, 64)
    serve(cache, text(0, 20))
    long, short = cache.pin(text(0, 20)), cache.pin(text(0, 5))
    long.close()
    with rejected(cache, errors.PinError, "closed already"):
        long.close()
    with rejected(cache, errors.OutOfSlots):
        cache.open([7])
    short.close()
    cache.open([7])


def test_a_pin_of_nothing_holds_nothing():
    cache = SlotCache(1, 64)
    with cache.pin([1, 2, 3]) as pin:
        assert pin.num_tokens == 0
        cache.open([7])


# -- what it says --------------------------------------------------------------------------


def test_every_missed_token_has_a_reason():
    cache = SlotCache(1, 64)
    serve(cache, text(0, 20))
    serve(cache, text(1000, 20))
    serve(cache, text(0, 30))
    stats = cache.stats
    assert stats.missed == {"last_token": 3, "evicted": 20, "scope": 0, "cold": 19 + 19 + 9}
    serve(cache, text(0, 30), Scope(salt="x"))
    assert cache.stats.missed["scope"] == 29
    serve(cache, text(0, 10), Scope(salt="x"))
    assert cache.stats.hit_tokens == 9
    assert cache.stats.hit_rate == pytest.approx(9 / 110)
    assert cache.stats.missed_tokens == 101


def test_a_rejected_speculation_is_no_eviction():
    cache = SlotCache(2, 64)
    handle = prefill(cache, text(0, 20))
    cache.truncate(handle, 10)
    assert cache.stats.evicted_tokens == 0
    cache.close(handle)
    cache.allocate()
    cache.allocate()
    assert cache.stats.evicted_tokens == 10


def test_the_representation_says_who_has_the_slots():
    cache = SlotCache(4, 64)
    serve(cache, text(1000, 10))
    cache.pin(text(1000, 10))
    handle = prefill(cache, text(0, 20))
    assert "4 slots of 64 tokens: 1 busy, 1 free with content, 2 empty, 1 pinned" in repr(cache)
    assert "30 tokens held" in repr(cache)
    assert "20 of 64 tokens computed" in repr(handle)
    cache.close(handle)
    assert "closed" in repr(handle)
