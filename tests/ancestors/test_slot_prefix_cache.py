"""A slot allocator with a radix prefix cache, feature by feature, in quire.

slots    allocate, free, occupy, is it free, its version, how many are free; all of them cheap
prefixes insert, find (length, slot, version), pin and release; what is found needs no compute
copies   KV goes from slot to slot over all layers
eviction least recently used first, references counted, never more than there is room for
"""

from time import thread_time

import pytest
from ancestors_help import LAYOUT, kv_of, run, same, torch

from quire import SlotCache, SlotPool
from quire.errors import CommitError, OutOfSlots, PinError, SlotError, StaleSlot, TokensError
from quire.slots import check

MAX_TOKENS = 32


class Slots:
    """The smallest engine of slots: a cache, its memory, and a model whose KV tells its prefix."""

    def __init__(self, num_slots):
        self.cache = SlotCache(num_slots, MAX_TOKENS)
        self.pool = SlotPool(LAYOUT, num_slots, MAX_TOKENS, poison=torch.nan)

    def prefill(self, tokens):
        """Open a request and compute what of its prompt is not there; return its handle."""
        handle = self.cache.open(tokens)
        self.copy()
        self.pool.forget(handle.slot, handle.num_cached)
        self.compute(handle, tokens[handle.num_cached :])
        return handle

    def compute(self, handle, token_ids):
        """Write the KV of the next tokens into the slot and commit them."""
        tokens = [*handle.tokens.tolist(), *(int(token) for token in token_ids)]
        start = handle.computed
        for layer, new in zip(self.pool.slot(handle.slot), kv_of(tokens, start), strict=True):
            for states, written in zip(layer, new, strict=True):
                states[0, :, start : len(tokens)] = written
        self.cache.commit(handle, token_ids)

    def copy(self):
        """Do the planned copies; return them."""
        copies = self.cache.take_copies()
        self.pool.copy(copies)
        return copies

    def serve(self, tokens):
        """Compute a prompt and close it; return the slot that holds it now."""
        handle = self.prefill(tokens)
        self.cache.close(handle)
        return handle.slot

    def holds(self, slot, tokens):
        """Whether a slot's memory holds the KV of these tokens, in every layer."""
        layers = self.pool.slot(slot)
        read = [(k[0, :, : len(tokens)], v[0, :, : len(tokens)]) for k, v in layers]
        return same(read, kv_of(tokens))


@pytest.fixture
def slots():
    return Slots(3)


# -- slots ---------------------------------------------------------------------------------


def test_an_allocated_slot_is_empty_and_counted(slots):
    cache = slots.cache
    handle = cache.allocate()
    assert (handle.computed, handle.room) == (0, MAX_TOKENS)
    assert (cache.num_free, cache.num_busy) == (2, 1)
    assert [cache.is_free(slot) for slot in range(3)].count(False) == 1
    assert not cache.is_free(handle.slot)
    check(cache)


def test_a_freed_slot_is_free_and_holds_nothing(slots):
    cache = slots.cache
    handle = slots.prefill(run(0, 10))
    cache.free(handle)
    assert cache.num_free == 3
    assert cache.is_free(handle.slot)
    assert cache.find(run(0, 10)) is None
    with pytest.raises(SlotError, match="was closed already"):
        cache.free(handle)


def test_a_free_slot_is_occupied_with_all_that_it_holds(slots):
    cache = slots.cache
    slot = slots.serve(run(0, 10))
    handle = cache.occupy(slot, cache.generation(slot))
    assert handle.tokens.tolist() == list(range(10))
    assert (cache.num_free, cache.is_free(slot)) == (2, False)
    slots.compute(handle, [70, 71])
    assert slots.holds(slot, [*range(10), 70, 71])
    with pytest.raises(SlotError, match=f"slot {slot} is busy"):
        cache.occupy(slot)


def test_a_version_changes_when_content_goes_and_not_when_it_grows(slots):
    cache = slots.cache
    handle = slots.prefill(run(0, 10))
    first = handle.generation
    slots.compute(handle, [70])
    cache.close(handle)
    assert cache.generation(handle.slot) == first
    handle = cache.occupy(handle.slot)
    cache.truncate(handle, 4)
    assert handle.generation > first
    cache.close(handle)
    with pytest.raises(StaleSlot, match="look it up again"):
        cache.occupy(handle.slot, first)


def test_slots_are_occupied_freed_and_asked_in_constant_time():
    def seconds(num_slots):
        cache = SlotCache(num_slots, 4)
        best = 1.0
        for _ in range(50):
            start = thread_time()
            cache.close(cache.occupy(7))
            assert cache.is_free(7)
            assert cache.generation(7) == 0
            assert cache.num_free == num_slots
            best = min(best, thread_time() - start)
        return best

    assert seconds(50_000) < 10 * seconds(20)


# -- prefixes ------------------------------------------------------------------------------


def test_a_prefix_is_found_with_its_length_slot_and_version_at_any_depth(slots):
    cache = slots.cache
    slot = slots.serve(run(0, 20))
    for length in range(1, 20):
        assert cache.find([*run(0, length), 999]) == (length, slot, cache.generation(slot))
    assert cache.find([999, 0, 1]) is None


def test_the_longest_of_several_prefixes_is_found(slots):
    short = slots.serve([1, 2, 3, 4, 5])
    handle = slots.cache.allocate()
    slots.compute(handle, [1, 2, 3, 4, 6, 7, 8])
    assert slots.cache.find([1, 2, 3, 4, 5, 9])[:2] == (5, short)
    assert slots.cache.find([1, 2, 3, 4, 6, 7, 9])[:2] == (6, handle.slot)


def test_only_computed_tokens_are_found(slots):
    handle = slots.cache.open(run(0, 10))
    assert slots.cache.find(run(0, 10)) is None
    slots.compute(handle, run(0, 4))
    assert slots.cache.find(run(0, 10)).num_tokens == 4


def test_a_free_slot_with_the_prefix_is_taken_over_without_a_copy(slots):
    slot = slots.serve(run(0, 10))
    handle = slots.cache.open([*run(0, 10).tolist(), 70, 71])
    assert (handle.slot, handle.num_cached) == (slot, 10)
    assert slots.copy() == []
    slots.compute(handle, [70, 71])
    assert slots.holds(slot, [*range(10), 70, 71])
    assert slots.cache.stats.reoccupied_slots == 1


def test_a_prefix_is_pinned_until_it_is_released(slots):
    with slots.cache.pin([0, 1, 2, 3]) as nothing:
        assert nothing.num_tokens == 0
    slot = slots.serve(run(0, 10))
    pin = slots.cache.pin(run(0, 8))
    assert (pin.slot, pin.num_tokens) == (slot, 8)
    for start in range(1000, 9000, 1000):
        slots.serve(run(start, 10))
    assert slots.cache.find(run(0, 10))[:2] == (9, slot)
    assert slots.holds(slot, run(0, 10))
    pin.close()
    for start in range(1000, 4000, 1000):
        slots.serve(run(start, 10))
    assert slots.cache.find(run(0, 10)) is None
    with pytest.raises(PinError, match="was closed already"):
        pin.close()


# -- copies --------------------------------------------------------------------------------


def test_a_prefix_in_a_busy_slot_is_copied_over_all_layers(slots):
    first = slots.prefill(run(0, 10))
    other = [*run(0, 6).tolist(), 70, 71]
    handle = slots.cache.open(other)
    assert (handle.num_cached, handle.slot != first.slot) == (6, True)
    assert slots.copy() == [(first.slot, handle.slot, 6, 0)]
    assert slots.holds(handle.slot, run(0, 6))
    slots.compute(handle, [70, 71])
    assert slots.holds(handle.slot, other)
    assert slots.holds(first.slot, run(0, 10))


def test_a_fork_is_a_copy_that_goes_its_own_way(slots):
    first = slots.prefill(run(0, 10))
    twin = slots.cache.fork(first)
    slots.copy()
    slots.compute(first, [70])
    slots.compute(twin, [80])
    assert slots.holds(first.slot, [*range(10), 70])
    assert slots.holds(twin.slot, [*range(10), 80])


def test_copies_that_follow_one_another_are_done_at_once(slots):
    """The source of a copy is given away before the copies are done: contents still arrive."""
    slots.serve(run(1000, 10))
    slots.serve(run(2000, 10))
    first = slots.prefill(run(0, 10))
    second = slots.cache.open([*run(0, 8).tolist(), 70])
    third = slots.cache.fork(second)
    slots.cache.close(first)
    assert len(slots.copy()) == 2
    for handle in (second, third):
        slots.compute(handle, [70])
        assert slots.holds(handle.slot, [*range(8), 70])


# -- eviction ------------------------------------------------------------------------------


def test_the_least_recently_used_slot_is_given_away_first(slots):
    held = {start: slots.serve(run(start, 10)) for start in (1000, 2000, 3000)}
    slots.serve([*run(1000, 10), 7])
    assert slots.serve(run(4000, 10)) == held[2000]
    assert slots.serve(run(5000, 10)) == held[3000]
    assert slots.serve(run(6000, 10)) == held[1000]
    assert slots.cache.stats.evicted_tokens == 31


def test_an_empty_slot_is_given_away_before_any_content(slots):
    slots.serve(run(0, 10))
    slots.serve(run(1000, 10))
    slots.serve(run(2000, 10))
    assert slots.cache.find(run(0, 11)).num_tokens == 10


def test_references_are_counted_and_the_last_release_lets_go(slots):
    slots.serve(run(0, 10))
    one, other = slots.cache.pin(run(0, 10)), slots.cache.pin(run(0, 6))
    one.close()
    for start in range(1000, 5000, 1000):
        slots.serve(run(start, 10))
    assert slots.cache.find(run(0, 7)).num_tokens == 6
    other.close()
    for start in range(5000, 8000, 1000):
        slots.serve(run(start, 10))
    assert slots.cache.find(run(0, 7)) is None


def test_slots_in_use_are_never_given_away(slots):
    running = [slots.prefill(run(1000 * i, 10)) for i in range(2)]
    slots.serve(run(5000, 10))
    pin = slots.cache.pin(run(5000, 10))
    with pytest.raises(OutOfSlots, match="of 3 slots 2 are busy and 1 more are pinned") as caught:
        slots.cache.open(run(6000, 10))
    assert (caught.value.num_slots, caught.value.busy, caught.value.pinned) == (3, 2, 1)
    assert [slots.holds(h.slot, run(1000 * i, 10)) for i, h in enumerate(running)] == [True, True]
    pin.close()
    assert slots.serve(run(6000, 10)) == pin.slot


def test_no_more_is_held_than_there_is_room_for(slots):
    for start in range(0, 50_000, 1000):
        slots.serve(run(start, 20))
    kept = [start for start in range(0, 50_000, 1000) if slots.cache.find(run(start, 20))]
    assert kept == [47_000, 48_000, 49_000]
    with pytest.raises(TokensError, match="a prompt of 33 tokens does not fit a slot of 32"):
        slots.cache.open(run(0, 33))
    handle = slots.prefill(run(0, 30))
    with pytest.raises(CommitError, match="a slot holds 32"):
        slots.cache.commit(handle, [1, 2, 3])
    assert handle.computed == 30
    check(slots.cache)
