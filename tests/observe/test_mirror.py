"""A mirror: what a cache holds in each group and on each medium, according to events."""

import pytest

from quire.exchange.wire import ClearedEvent, EventBatch, RemovedEvent, StoredEvent, UnknownEvent
from quire.observe import Mirror

PROMPT = list(range(16))


def stored(hashes, tokens, parent=None, **more):
    size = more.pop("block_size", 4)
    event = StoredEvent(
        hashes, parent, tokens, size, None, more.pop("medium", "GPU"), more.pop("lora", None)
    )
    for name, value in more.items():
        setattr(event, name, value)
    return event


def placed(mirror):
    return {place: copies for place, copies in mirror.num_copies.items() if copies}


def mirror_of(*events):
    mirror = Mirror()
    mirror.receive(EventBatch(0.0, events))
    mirror.check()
    return mirror


FIRST, REST = stored([1, 2], PROMPT[:8]), stored([3, 4], PROMPT[8:], 2)


def test_a_prompt_is_found_as_far_as_its_blocks_are_there():
    mirror = mirror_of(FIRST, REST)
    assert [mirror.lookup(PROMPT[:n]) for n in (3, 4, 11, 16)] == [0, 4, 8, 16]
    assert mirror.lookup([9, *PROMPT[1:]]) == 0
    assert mirror.lookup(PROMPT[:8] + [9] * 8) == 8


def test_removed_blocks_are_not_found_in_a_mirror():
    mirror = mirror_of(FIRST, REST, RemovedEvent([3], "GPU"))
    assert mirror.lookup(PROMPT) == 8
    mirror.apply(stored([3], PROMPT[8:12], 2))
    assert mirror.lookup(PROMPT) == 16


def test_a_block_stored_twice_stays_until_it_was_removed_twice():
    mirror = mirror_of(FIRST, FIRST, RemovedEvent([2], "GPU"))
    assert mirror.lookup(PROMPT) == 8
    mirror.apply(RemovedEvent([2], "GPU"))
    mirror.check()
    assert mirror.lookup(PROMPT) == 4


def test_storage_media_are_counted_apart_and_none_means_the_device():
    mirror = mirror_of(
        FIRST, stored([1], PROMPT[:4], medium="CPU"), stored([3], PROMPT[8:12], 2, medium=None)
    )
    assert (mirror.lookup(PROMPT), mirror.lookup(PROMPT, medium="CPU")) == (12, 4)
    mirror.apply(RemovedEvent([1], "CPU"))
    assert (mirror.lookup(PROMPT), mirror.lookup(PROMPT, medium="CPU")) == (12, 0)


def test_extra_keys_and_adapters_tell_prompts_apart():
    salted = stored([7, 8], PROMPT[:8], extra_keys=[["salt"], None])
    lora = stored([9], PROMPT[:4], lora="poet", extra_keys=[["poet"]])
    mirror = mirror_of(salted, lora)
    assert mirror.lookup(PROMPT) == 0
    assert mirror.lookup(PROMPT, extra_keys=[["salt"]]) == 8
    assert mirror.lookup(PROMPT, lora_name="poet", extra_keys=[["poet"]]) == 4


def test_a_window_needs_its_last_blocks_alone():
    window = {
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 6,
    }
    mirror = mirror_of(
        FIRST, REST, stored([1, 2], PROMPT[:8], **window), stored([3, 4], PROMPT[8:], 2, **window)
    )
    assert mirror.lookup(PROMPT) == 16
    mirror.apply(RemovedEvent([1, 2], "GPU", 1))
    assert (mirror.lookup(PROMPT), mirror.lookup(PROMPT[:12])) == (16, 0)
    mirror.apply(RemovedEvent([4], "GPU", 1))
    assert mirror.lookup(PROMPT) == 0


def test_a_state_is_needed_at_the_end_alone_and_a_chunk_from_its_border():
    state = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}
    mirror = mirror_of(FIRST, REST, stored([3], PROMPT[8:12], 2, **state))
    assert mirror.lookup(PROMPT) == 12
    chunk = {
        "group_idx": 1,
        "kv_cache_spec_kind": "chunked_local_attention",
        "kv_cache_spec_sliding_window": 8,
    }
    mirror = mirror_of(FIRST, REST, stored([3], PROMPT[8:12], 2, **chunk))
    assert [mirror.lookup(PROMPT[:n]) for n in (16, 15, 11)] == [16, 12, 8]


def test_tokens_of_a_sparse_groups_blocks_come_from_the_full_group():
    masked = stored(
        [4],
        PROMPT,
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=4,
    )
    mirror = mirror_of(masked, FIRST, REST)
    assert mirror.lookup(PROMPT) == 16
    assert mirror_of(FIRST, REST, masked).lookup(PROMPT[:12]) == 0


def test_groups_may_have_blocks_of_other_sizes():
    large = stored([2, 4], PROMPT, block_size=8, group_idx=1, kv_cache_spec_kind="full_attention")
    mirror = mirror_of(FIRST, REST, large)
    assert (mirror.lookup(PROMPT), mirror.lookup(PROMPT[:12])) == (16, 8)


@pytest.mark.parametrize(
    "events", [(), (FIRST, REST), (REST, FIRST), (FIRST, FIRST, stored([5], [1] * 4, 2))]
)
def test_the_events_of_a_mirror_make_an_equal_mirror(events):
    window = {
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 6,
    }
    mirror = mirror_of(
        *events,
        stored([2, 3], PROMPT, **window),
        stored([8], PROMPT[:4], lora="a", extra_keys=[["a", "b"]], medium="CPU"),
    )
    again = mirror_of(*mirror.events())
    assert placed(again) == placed(mirror)
    assert again.groups == mirror.groups
    assert {k: msg.key for k, msg in again.blocks.items()} == {
        k: msg.key for k, msg in mirror.blocks.items()
    }


def test_its_events_tell_of_groups_that_hold_nothing():
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    mirror = mirror_of(FIRST, stored([1], PROMPT[:4], **window), RemovedEvent([1], "GPU", 1))
    assert mirror_of(*mirror.events()).lookup(PROMPT) == mirror.lookup(PROMPT) == 0


def test_events_of_a_mirror_store_parents_first():
    assert [each.block_hashes for each in mirror_of(REST, FIRST).events()] == [[1, 2, 3, 4]]


def test_cleared_is_empty_and_what_is_not_known_changes_nothing():
    mirror = mirror_of(FIRST, UnknownEvent("BlockMoved"), RemovedEvent([99], "GPU"))
    assert len(mirror) == 2
    mirror.apply(ClearedEvent())
    mirror.check()
    assert (len(mirror), mirror.lookup(PROMPT)) == (0, 0)
