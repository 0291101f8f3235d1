"""Bad input: the right error, a message that names the value, and a state that did not change."""

from array import array

import numpy as np
import pytest
from core_help import found, generate, prefill, rejected, run, serve

from quire import errors
from quire.core import CacheManager, LayerGroup, MediaItem, Scope


@pytest.fixture
def manager():
    """16 blocks of 4, with an open, a cached and a closed sequence in it."""
    manager = CacheManager(num_blocks=16, block_size=4)
    serve(manager, run(1000, 8))
    manager.open(run(1000, 8))
    return manager


# -- settings ------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [0, -1, 1.5, "16", None, True])
def test_a_block_size_must_be_a_positive_integer(block_size):
    with pytest.raises(errors.ConfigError, match=str(block_size)):
        CacheManager(num_blocks=4, block_size=block_size)


@pytest.mark.parametrize("num_blocks", [0, -1, 1.5, "4", True])
def test_a_pool_must_have_a_positive_number_of_blocks(num_blocks):
    with pytest.raises(errors.ConfigError, match=str(num_blocks)):
        CacheManager(num_blocks=num_blocks, block_size=4)


def test_a_manager_without_a_pool_is_refused():
    with pytest.raises(errors.ConfigError):
        CacheManager(block_size=4)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_layer_group_must_have_blocks(num_blocks):
    with pytest.raises(errors.ConfigError, match=str(num_blocks)):
        CacheManager(block_size=4, groups=[LayerGroup("a", 4), LayerGroup("b", num_blocks)])


def test_an_empty_list_of_layer_groups_is_refused():
    with pytest.raises(errors.ConfigError):
        CacheManager(block_size=4, groups=[])


def test_two_layer_groups_with_one_name_are_refused():
    with pytest.raises(errors.ConfigError, match="same"):
        CacheManager(block_size=4, groups=[LayerGroup("same", 4), LayerGroup("same", 4)])


def test_layer_groups_and_num_blocks_together_are_refused():
    with pytest.raises(errors.ConfigError):
        CacheManager(num_blocks=7, block_size=4, groups=[LayerGroup("a", 4)])


@pytest.mark.parametrize("policy", ["lruu", "LRU", 7, None])
def test_an_unknown_policy_is_refused(policy):
    with pytest.raises(errors.ConfigError, match=str(policy)):
        CacheManager(num_blocks=4, block_size=4, policy=policy)


@pytest.mark.parametrize("budget", [-0.1, 1.1, "half", float("nan")])
def test_a_pin_budget_must_be_a_share(budget):
    with pytest.raises(errors.ConfigError, match=str(budget)):
        CacheManager(num_blocks=4, block_size=4, pin_budget=budget)


# -- tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["open", "probe", "explain", "pin"])
@pytest.mark.parametrize(
    ("tokens", "mention"),
    [
        ([1, 2**31], 2**31),
        ([1, 2**40], 2**40),
        ([1, 2**70], ""),
        ([-1, 1], -1),
        (np.array([3, 2**31], dtype=np.int64), 2**31),
        (np.array([3, 2**63], dtype=np.uint64), 2**63),
        (array("q", [5, -5]), -5),
        ([1.0, 2.0], "float"),
        (np.array([1.5]), "float"),
        ([True, False], "bool"),
        (np.array([True]), "bool"),
        ([[1, 2], [3, 4]], "2"),
        (np.zeros((2, 2), dtype=np.int32), "2"),
        (np.int32(4), "0"),
        (["a"], ""),
        ("text", ""),
        ([1, None], ""),
        ([[1, 2], [3]], ""),
        (None, ""),
        (7, ""),
    ],
)
def test_tokens_must_be_a_row_of_ids(manager, method, tokens, mention):
    with rejected(manager, errors.TokensError, mention):
        getattr(manager, method)(tokens)


def test_a_negative_id_in_an_int32_array_is_never_stored(manager):
    with rejected(manager, errors.TokensError, -7):
        manager.open(np.array([3, -7], dtype=np.int32))
    seq = prefill(manager, run(5000, 5))
    manager.reserve(seq, 1)
    with rejected(manager, errors.TokensError, -7):
        manager.commit(seq, np.array([-7], dtype=np.int32))


@pytest.mark.parametrize("tokens", [[], (), np.array([], dtype=np.int32), np.array([])])
def test_an_empty_prompt_is_refused(manager, tokens):
    with rejected(manager, errors.TokensError):
        manager.open(tokens)


@pytest.mark.parametrize("ids", [[-1], [2**31], [1.5], [[1]], [True], "x"])
def test_a_commit_of_what_are_no_tokens_is_refused(manager, ids):
    seq = prefill(manager, run(5000, 5))
    manager.reserve(seq, 1)
    with rejected(manager, errors.TokensError):
        manager.commit(seq, ids)


@pytest.mark.parametrize("ids", [[1, -1], [1, 2**31], [1.5, 2.5], [[1], [2]]])
def test_a_step_with_bad_tokens_is_refused_for_all_its_sequences(manager, ids):
    batch = manager.batch([prefill(manager, run(5000, 5)), prefill(manager, run(6000, 5))])
    manager.reserve_step(batch)
    with rejected(manager, errors.TokensError):
        manager.commit_step(batch, ids)


@pytest.mark.parametrize("ids", [[], [1], [1, 2, 3]])
def test_a_step_takes_one_token_per_sequence(manager, ids):
    batch = manager.batch([prefill(manager, run(5000, 5)), prefill(manager, run(6000, 5))])
    manager.reserve_step(batch)
    with rejected(manager, errors.QuireError, len(ids)):
        manager.commit_step(batch, ids)


# -- scopes and media ----------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["tenant", 7, b"x", ("a",), {"salt": "a"}, object()])
@pytest.mark.parametrize("method", ["open", "probe", "explain", "pin", "evict"])
def test_a_scope_must_be_a_scope(manager, method, scope):
    with rejected(manager, errors.ScopeError, type(scope).__name__):
        getattr(manager, method)(run(1000, 8), scope)


@pytest.mark.parametrize("part", ["salt", "lora", "model"])
@pytest.mark.parametrize("value", [1.5, ["a"], ("a", "b"), object(), True])
def test_a_scope_part_must_be_none_text_bytes_or_an_integer(manager, part, value):
    with rejected(manager, errors.ScopeError, part):
        manager.open(run(1000, 8), Scope(**{part: value}))


@pytest.mark.parametrize(
    "items",
    [
        [(b"d" * 16, 6, 3)],
        [(b"d" * 16, 8, 1)],
        [(b"d" * 16, -1, 2)],
        [(b"d" * 16, 2, 0)],
        [(b"d" * 16, 2, -1)],
        [(b"a" * 16, 0, 3), (b"b" * 16, 2, 2)],
        [(b"a" * 16, 4, 2), (b"b" * 16, 0, 2)],
        [("text", 0, 2)],
        [(b"a" * 16, 0.5, 2)],
        ["no item"],
    ],
)
@pytest.mark.parametrize("method", ["open", "probe"])
def test_media_must_lie_in_the_prompt_in_order_without_overlap(manager, method, items):
    with rejected(manager, errors.MediaError):
        media = [MediaItem(*item) if isinstance(item, tuple) else item for item in items]
        getattr(manager, method)(run(1000, 8), None, media=media)


@pytest.mark.parametrize("num_bytes", [0, 15, 65])
def test_a_content_digest_has_16_to_64_bytes(num_bytes):
    with pytest.raises(errors.MediaError, match=f"16 to 64 bytes, this one has {num_bytes}"):
        MediaItem(b"d" * num_bytes, 0, 4)
    assert MediaItem(b"d" * 16, 0, 4) != MediaItem(b"d" * 64, 0, 4)


def test_a_media_error_names_the_span_and_the_length(manager):
    with rejected(manager, errors.MediaError, 6, 9, 8):
        manager.open(run(1000, 8), media=[MediaItem(b"d" * 16, 6, 3)])


# -- pins, eviction, time ------------------------------------------------------------------


def test_a_pin_above_the_budget_is_refused():
    manager = CacheManager(num_blocks=8, block_size=4, pin_budget=0.5)
    serve(manager, run(0, 20))
    with rejected(manager, errors.PinBudgetExceeded, 5, 4):
        manager.pin(run(0, 20))
    pin = manager.pin(run(0, 16))
    assert pin.num_tokens == 16


def test_a_pin_closed_twice_is_refused(manager):
    pin = manager.pin(run(1000, 8))
    pin.close()
    with rejected(manager, errors.PinError):
        pin.close()


@pytest.mark.parametrize("num_blocks", [-1, 1.5, "3", None])
def test_a_reclaim_must_be_a_number_of_blocks(manager, num_blocks):
    with rejected(manager, errors.QuireError, num_blocks):
        manager.reclaim(num_blocks)


def test_retention_without_a_clock_is_refused(manager):
    with rejected(manager, errors.ConfigError, "clock"):
        manager.open(run(0, 4), retain_s=5.0)
    with rejected(manager, errors.ConfigError, "clock"):
        manager.pin(run(1000, 8), ttl_s=5.0)


@pytest.mark.parametrize("seconds", [-1, -0.5, float("nan"), "5"])
def test_negative_or_unreadable_durations_are_refused(seconds):
    manager = CacheManager(num_blocks=8, block_size=4, clock=lambda: 0.0)
    serve(manager, run(0, 8))
    with rejected(manager, errors.ConfigError, seconds):
        manager.open(run(0, 4), retain_s=seconds)
    with rejected(manager, errors.ConfigError, seconds):
        manager.pin(run(0, 8), ttl_s=seconds)


@pytest.mark.parametrize("priority", [1.5, "high", None])
def test_a_priority_must_be_an_integer(manager, priority):
    with rejected(manager, errors.ConfigError, priority):
        manager.open(run(0, 4), priority=priority)


def test_a_layer_group_out_of_range_is_refused(manager):
    seq = prefill(manager, run(5000, 6))
    for group in (1, -1):
        with rejected(manager, errors.QuireError, group):
            manager.tables([seq], group=group)
        with rejected(manager, errors.QuireError, group):
            seq.block_ids(group)


def test_after_every_refusal_the_manager_still_works(manager):
    for bad in ([], [-1], [2**31], "x"):
        with rejected(manager, errors.TokensError):
            manager.open(bad)
    seq = prefill(manager, run(7000, 10))
    generate(manager, seq, [1, 2, 3])
    manager.close(seq)
    assert found(manager, [*run(7000, 10).tolist(), 1, 2, 3]) == 12
