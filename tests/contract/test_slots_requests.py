"""Requests, pins and slots taken by hand: what changes a slot, and what every misuse leaves alone."""

import numpy as np
import pytest
from slots_help import found, prefill, rejected, serve, text

from quire import errors
from quire.core import MediaItem, Scope
from quire.slots import SlotCache, SlotCopy

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


def test_truncate_rejects_speculated_tokens_exactly():
    cache = SlotCache(2, 64)
    handle = prefill(cache, text(0, 20))
    cache.commit(handle, [500, 501, 502])
    cache.truncate(handle, 21)
    assert handle.tokens.tolist() == [*range(20), 500]
    cache.commit(handle, [600])
    assert found(cache, [*range(20), 500, 600]) == 22
    assert found(cache, [*range(20), 500, 501]) == 21


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


def test_a_slot_that_find_returns_can_be_occupied():
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


def test_every_misuse_raises_and_changes_nothing():
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


def test_a_pinned_slot_serves_prompts_that_begin_with_the_pinned_prefix():
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


def test_pins_on_every_slot_fail_fast():
    cache = SlotCache(2, 64)
    for start in (0, 1000):
        serve(cache, text(start, 20))
    pins = [cache.pin(text(start, 20)) for start in (0, 1000)]
    with rejected(cache, errors.OutOfSlots, "2 more are pinned"):
        cache.open([7, 8])
    pins[0].close()
    cache.open([7, 8])


def test_a_pin_of_nothing_holds_nothing():
    cache = SlotCache(1, 64)
    with cache.pin([1, 2, 3]) as pin:
        assert pin.num_tokens == 0
        cache.open([7])


# -- what it says --------------------------------------------------------------------------


def test_hits_are_counted_by_tokens():
    cache = SlotCache(1, 64)
    serve(cache, text(0, 20))
    serve(cache, text(1000, 20))
    serve(cache, text(0, 30))
    serve(cache, text(0, 30), Scope(salt="x"))
    assert cache.stats.hit_tokens == 0
    serve(cache, text(0, 10), Scope(salt="x"))
    assert cache.stats.hit_tokens == 9
    assert cache.stats.hit_rate == pytest.approx(9 / 110)
    assert (cache.stats.num_requests, cache.stats.prompt_tokens) == (5, 110)


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
