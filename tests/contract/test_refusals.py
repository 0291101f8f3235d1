"""Refusals: the right error, a message that names the value, and a state that did not change."""

from array import array

import numpy as np
import pytest
from core_help import found, generate, prefill, rejected, run, serve, state

from clocks import Clock
from quire import ops
from quire.core import CacheManager, FullAttention, Hint, LayerGroup, MediaItem, Scope
from quire.errors import (
    CommitError,
    ConfigError,
    CopyError,
    MediaError,
    OutOfBlocks,
    PinBudgetExceeded,
    PinError,
    QuireError,
    ScopeError,
    SequenceError,
    TokensError,
    TruncateError,
)
from quire.exchange import blocks_of, required_blocks, residency, restore
from quire.groups import SlidingWindow

NAN = float("nan")
CACHED = run(1000, 8)


class Stage:
    """16 blocks of 4: a cached prompt; sequences that are computed, reserved, opened, suspended and closed."""

    def __init__(self, **options):
        self.manager = CacheManager(num_blocks=16, block_size=4, **options)
        serve(self.manager, CACHED, hint=Hint("session", session_id="a"))
        self.seq = prefill(self.manager, run(5000, 6))
        self.reserved = prefill(self.manager, run(6000, 6))
        self.manager.reserve(self.reserved, 2)
        self.batch = self.manager.batch([prefill(self.manager, run(n, 5)) for n in (9000, 9500)])
        self.manager.reserve_step(self.batch)
        self.opened = self.manager.open(CACHED)
        ops.admit(self.manager, self.opened)
        self.suspended = prefill(self.manager, run(7000, 6))
        self.manager.suspend(self.suspended)
        self.closed = prefill(self.manager, run(8000, 6))
        self.manager.close(self.closed)
        self.elsewhere = CacheManager(num_blocks=16, block_size=4)
        self.foreign = prefill(self.elsewhere, run(5000, 6))


@pytest.fixture
def stage():
    return Stage()


# -- settings ------------------------------------------------------------------------------

TWICE = [LayerGroup("same", 4), LayerGroup("same", 4)]
SETTINGS = [
    *[({"num_blocks": 4, "block_size": bad}, bad) for bad in (0, -1, 1.5, "16", None, True)],
    *[({"num_blocks": bad}, bad) for bad in (0, -1, 1.5, "4", True)],
    *[({"num_blocks": 4, "policy": bad}, bad) for bad in ("lruu", "LRU", 7, None)],
    ({"num_blocks": 4, "policy": lambda _tick, _capacity: 7}, 7),
    *[({"num_blocks": 4, "pin_budget": bad}, bad) for bad in (-0.1, 1.1, "half", NAN)],
    *[({"groups": [LayerGroup("a", 4), LayerGroup("b", bad)]}, bad) for bad in (0, -1)],
    ({}, "give num_blocks or groups"),
    ({"groups": []}, "groups is empty"),
    ({"groups": TWICE}, "same"),
    ({"num_blocks": 7, "groups": [LayerGroup("a", 4)]}, "one of them"),
    ({"num_blocks": 4, "clock": 7}, "clock"),
    ({"groups": 5}, 5),
    ({"groups": [LayerGroup(["a"], 4)]}, "name"),
    *[({"num_blocks": 4, name: "no"}, name) for name in ("sub_block", "pool")],
    ({"num_blocks": 4, "pool": dict}, "CheckedPool"),
    ({"num_blocks": 4, "watchers": [5]}, 5),
]


@pytest.mark.parametrize(("settings", "mention"), SETTINGS)
def test_settings_that_cannot_work_are_refused_by_name(settings, mention):
    with pytest.raises(ConfigError, match=str(mention)):
        CacheManager(**{"block_size": 4} | settings)


# -- tokens, scopes and media --------------------------------------------------------------

PROMPTS = [
    ([1, 2**31], 2**31),
    ([1, 2**40], 2**40),
    ([1, 2**70], ""),
    ([-1, 1], -1),
    (np.array([3, 2**31], dtype=np.int64), 2**31),
    (np.array([3, 2**63], dtype=np.uint64), 2**63),
    (array("q", [5, -5]), -5),
    ([1.0, 2.0], "float"),
    ([True, False], "bool"),
    (np.array([True]), "bool"),
    ([[1, 2], [3, 4]], "2"),
    (np.int32(4), "0"),
    *[(bad, "") for bad in (["a"], "text", [1, None], [[1, 2], [3]], None, 7)],
    *[(bad, "") for bad in ([], (), np.array([], dtype=np.int32), np.array([]))],
]


@pytest.mark.cases(29)
@pytest.mark.parametrize("method", [CacheManager.open, CacheManager.probe, ops.explain, ops.pin])
@pytest.mark.parametrize(("tokens", "mention"), PROMPTS)
def test_tokens_must_be_a_row_of_ids(stage, method, tokens, mention):
    with rejected(stage.manager, TokensError, mention):
        method(stage.manager, tokens)


@pytest.mark.parametrize("scope", ["tenant", 7, b"x", ("a",), {"salt": "a"}, object()])
@pytest.mark.parametrize(
    "method",
    [CacheManager.open, CacheManager.probe, ops.explain, ops.pin, ops.invalidate],
)
def test_a_scope_must_be_a_scope(stage, method, scope):
    with rejected(stage.manager, ScopeError, type(scope).__name__):
        method(stage.manager, CACHED, scope)


@pytest.mark.parametrize("part", ["salt", "lora", "model"])
@pytest.mark.parametrize("value", [1.5, ["a"], ("a", "b"), object(), True])
def test_a_scope_part_must_be_none_text_bytes_or_an_integer(part, value):
    with pytest.raises(ScopeError, match=part):
        Scope(**{part: value})


D = b"d" * 16
MEDIA = [
    [(D, 6, 3)],
    [(D, 8, 1)],
    [(D, -1, 2)],
    [(D, 2, 0)],
    [(D, 2, -1)],
    [(D, 0, 3), (b"b" * 16, 2, 2)],
    [(D, 4, 2), (b"b" * 16, 0, 2)],
    [("text", 0, 2)],
    [(D, 0.5, 2)],
    ["no item"],
]


@pytest.mark.parametrize("items", MEDIA)
@pytest.mark.parametrize("method", [CacheManager.open, CacheManager.probe])
def test_media_must_lie_in_the_prompt_in_order_without_overlap(stage, method, items):
    mentions = (6, 9, 8) if items == MEDIA[0] else ()
    with rejected(stage.manager, MediaError, *mentions):
        media = [MediaItem(*item) if isinstance(item, tuple) else item for item in items]
        method(stage.manager, CACHED, None, media=media)


@pytest.mark.parametrize("num_bytes", [0, 15, 65])
def test_a_content_digest_has_16_to_64_bytes(num_bytes):
    with pytest.raises(MediaError, match=f"16 to 64 bytes, this one has {num_bytes}"):
        MediaItem(b"d" * num_bytes, 0, 4)
    assert MediaItem(b"d" * 16, 0, 4) != MediaItem(b"d" * 64, 0, 4)


LOOKUPS = [ops.fits, ops.pin, ops.invalidate, ops.explain, residency, CacheManager.open]


@pytest.mark.parametrize("call", LOOKUPS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("at", [0, 5, 7, 8])
def test_a_negative_id_in_an_int32_array_is_seen_wherever_it_stands(stage, call, at):
    tokens = np.array([*CACHED, 7], np.int32)
    tokens[at] = -5
    with rejected(stage.manager, TokensError, -5):
        call(stage.manager, tokens)


def test_a_pin_whose_time_has_run_out_counts_as_closed():
    clock = Clock()
    stage = Stage(clock=clock)
    pin = ops.pin(stage.manager, CACHED, ttl_s=10)
    assert pin.is_held
    assert pin.tokens.tolist() == CACHED.tolist()
    clock.now += 10
    assert not pin.is_held
    assert pin.tokens.tolist() == []
    pin.close()
    ops.check(stage.manager)
    assert not stage.manager.kernel.holds.all


# -- hints ---------------------------------------------------------------------------------

HINTS = [
    *[lambda bad=bad: bad for bad in (None, "never", {"reuse": "never"}, Hint)],
    *[lambda bad=bad: Hint(bad) for bad in ("sometimes", None, ["never"], "session")],
    *[lambda bad=bad: Hint("session", session_id=bad) for bad in ("", 7, b"a", ["a"])],
    *[lambda bad=bad: Hint(ttl_s=bad) for bad in (-1, 0, NAN, 1e10, "10", True, np.arange(2))],
    lambda: Hint(ttl_s=float("inf"), session_id="new"),
    *[
        lambda bad=bad: Hint(returns_in_s=bad)
        for bad in (-1, 0, NAN, 1e10, "10", True, np.arange(2))
    ],
    *[lambda bad=bad: Hint(within=bad) for bad in (0.9, 0, -2, NAN, 1e4, "2", True, None)],
]


@pytest.mark.parametrize("number", range(len(HINTS)))
def test_a_hint_that_cannot_be_is_refused(number):
    stage = Stage(clock=lambda: 0.0)
    with rejected(stage.manager, ConfigError):
        stage.manager.open([*CACHED, 7], hint=HINTS[number]())
    assert stage.manager.end_session("new") == 0
    assert stage.manager.end_session("a") == 1  # the other one is used by a request without it


SECONDS = (-3, -1, 0, 0.0, NAN, float("inf"), -float("inf"), 1e10, True, "10", np.arange(2))


@pytest.mark.parametrize("field", ["ttl_s", "returns_in_s"])
@pytest.mark.parametrize("seconds", SECONDS, ids=repr)
def test_a_hint_is_not_made_of_seconds_that_cannot_be(field, seconds):
    with pytest.raises(ConfigError, match=f"{field} must be a number of seconds, above 0"):
        Hint(**{field: seconds})
    assert Hint(**{field: 3}) == Hint(**{field: 3.0})


@pytest.mark.parametrize("seconds", SECONDS, ids=repr)
def test_neither_pins_nor_retention_take_seconds_that_cannot_be(seconds):
    stage = Stage(clock=lambda: 0.0)
    with rejected(stage.manager, ConfigError, "ttl_s must be a number of seconds"):
        ops.pin(stage.manager, CACHED, ttl_s=seconds)
    with rejected(stage.manager, ConfigError, "retain_s must be a number of seconds"):
        stage.manager.open([*CACHED, 7], retain_s=seconds)


# -- calls ---------------------------------------------------------------------------------

OF_A_SEQUENCE = {
    "reserve": lambda m, seq: m.reserve(seq, 1),
    "commit": lambda m, seq: m.commit(seq, [1]),
    "truncate": lambda m, seq: ops.truncate(m, seq, 0),
    "fork": lambda m, seq: m.fork(seq),
    "suspend": lambda m, seq: m.suspend(seq),
    "batch": lambda m, seq: m.batch([seq]),
    "reserve_step": lambda m, seq: m.reserve_step([seq]),
    "commit_step": lambda m, seq: m.commit_step([seq], [1]),
    "tables": lambda m, seq: m.tables([seq]),
    "blocks_at": lambda m, seq: ops.blocks_at(m, [seq], np.zeros((1, 1), np.int64)),
    "resume": lambda m, seq: m.resume(seq),
    "close": lambda m, seq: m.close(seq),
    "blocks_of": blocks_of,
}


@pytest.mark.parametrize("name", OF_A_SEQUENCE)
def test_a_sequence_that_is_not_this_managers_is_refused(stage, name):
    call, before = OF_A_SEQUENCE[name], state(stage.elsewhere)
    for wrong, mention in ((stage.closed, "closed"), (stage.foreign, ""), (None, ""), ("seq", "")):
        with rejected(stage.manager, SequenceError, mention):
            call(stage.manager, wrong)
    assert state(stage.elsewhere) == before


@pytest.mark.parametrize("name", sorted(OF_A_SEQUENCE.keys() - {"resume", "close"}))
def test_a_suspended_sequence_can_only_be_resumed_or_closed(stage, name):
    with rejected(stage.manager, SequenceError, "suspended"):
        OF_A_SEQUENCE[name](stage.manager, stage.suspended)


CALLS = [
    (SequenceError, lambda s: s.manager.resume(s.seq), "open"),
    (SequenceError, lambda s: s.manager.batch([s.seq, s.seq]), "twice"),
    (SequenceError, lambda s: s.manager.reserve_step([s.seq, s.opened]), 1),
    (TokensError, lambda s: s.manager.open(np.array([3, -7], dtype=np.int32)), -7),
    (OutOfBlocks, lambda s: s.manager.open(run(0, 65)), 17),
    *[(QuireError, lambda s, n=n: s.manager.reserve(s.seq, n), n) for n in (-1, 1.5, "3", None)],
    (OutOfBlocks, lambda s: s.manager.reserve(s.seq, 64), "free"),
    (CommitError, lambda s: s.manager.commit(s.seq, [7]), 1),
    (CommitError, lambda s: s.manager.commit(s.reserved, [7, 7, 7]), 3),
    *[
        (TokensError, lambda s, ids=ids: s.manager.commit(s.reserved, ids), "")
        for ids in ([-1], [2**31], [1.5], [[1]], [True], "x", np.array([-7], dtype=np.int32))
    ],
    (CommitError, lambda s: s.manager.commit_step([s.seq, s.reserved], [1, 2]), "reserve_step"),
    *[
        (TokensError, lambda s, ids=ids: s.manager.commit_step(s.batch, ids), "")
        for ids in ([1, -1], [1, 2**31], [1.5, 2.5], [[1], [2]], [], [1], [1, 2, 3])
    ],
    *[
        (TruncateError, lambda s, n=n: ops.truncate(s.manager, s.seq, n), n)
        for n in (7, 100, -1, -4, 1.5, None)
    ],
    (ConfigError, lambda s: s.manager.open(run(0, 4), retain_s=5.0), "clock"),
    (ConfigError, lambda s: ops.pin(s.manager, CACHED, ttl_s=5.0), "clock"),
    (ConfigError, lambda s: s.manager.open(CACHED, hint=Hint(ttl_s=10)), "clock"),
    (ConfigError, lambda s: s.manager.open(CACHED, hint=Hint(returns_in_s=10)), "clock"),
    *[
        (ConfigError, lambda s, bad=bad: s.manager.open(run(0, 4), priority=bad), bad)
        for bad in (1.5, "high", None, 101)
    ],
    *[
        (ConfigError, lambda s, bad=bad: s.manager.end_session(bad), bad)
        for bad in ("", 7, b"a", ["a"])
    ],
    *[(QuireError, lambda s, n=n: ops.reclaim(s.manager, n), n) for n in (-1, 1.5, "3", None)],
    *[(QuireError, lambda s, g=g: s.manager.tables([s.seq], group=g), g) for g in (1, -1)],
    *[(QuireError, lambda s, g=g: s.seq.block_ids(g), g) for g in (1, -1)],
    (TruncateError, lambda s: ops.truncate(s.manager, s.seq, np.array([1, 2])), "array"),
    (SequenceError, lambda s: s.manager.tables(5), 5),
    (SequenceError, lambda s: ops.blocks_at(s.manager, 5, np.zeros((1, 1), np.int64)), 5),
    (ConfigError, lambda s: ops.blocks_at(s.manager, [s.seq], np.zeros((1, 1), np.int64), 1), 1),
    *[
        (ConfigError, lambda s, at=at: ops.blocks_at(s.manager, [s.seq], at), "indices")
        for at in (
            *([[0]], 0, None, np.zeros(1, np.int64), np.zeros((2, 1), np.int64), np.zeros((1, 1))),
            *(np.array([[0, bad]]) for bad in (-1, 2, 2**31, 2**62)),
            *(np.array([[bad]], np.uint64) for bad in (2, 2**63, 2**64 - 1)),
        )
    ],
    (SequenceError, lambda s: blocks_of(s.manager, 5), 5),
    (ConfigError, lambda s: s.manager.reserve(s.seq, np.array([1, 2])), "integer"),
    *[(QuireError, lambda s, n=n: restore(s.manager, CACHED, n, {}), n) for n in (0, 1.5, None)],
    *[
        (ConfigError, lambda s, bad=bad: restore(s.manager, run(0, 8), 1, bad), bad)
        for bad in (None, [0], {0: 5}, {0: [None]}, {"full": [0]})
    ],
    *[(ConfigError, lambda s, n=n: required_blocks(s.manager, 0, n), n) for n in (-1, 1.5, None)],
    (ConfigError, lambda s: required_blocks(s.manager, 1, 1), 1),
]  # fmt: skip


@pytest.mark.cases(29)
@pytest.mark.parametrize(("error", "call", "mention"), CALLS)
def test_a_call_that_cannot_be_is_refused(stage, error, call, mention):
    with rejected(stage.manager, error, mention):
        call(stage)


def test_a_duration_is_a_positive_number_of_seconds():
    stage = Stage(clock=lambda: 0.0)
    for seconds in (-1, -0.5, NAN, "5"):
        with rejected(stage.manager, ConfigError, seconds):
            stage.manager.open(run(0, 4), retain_s=seconds)
        with rejected(stage.manager, ConfigError, seconds):
            ops.pin(stage.manager, CACHED, ttl_s=seconds)


# -- at the wrong time ---------------------------------------------------------------------


def test_a_batch_with_a_sequence_closed_meanwhile_is_refused():
    manager = CacheManager(num_blocks=16, block_size=4)
    left, right = prefill(manager, run(5000, 6)), prefill(manager, run(6000, 6))
    batch = manager.batch([left, right])
    manager.close(right)
    with rejected(manager, SequenceError, "closed"):
        manager.reserve_step(batch)


def test_tokens_that_contradict_the_prompt_are_refused():
    manager = CacheManager(num_blocks=16, block_size=4)
    seq = manager.open(run(5000, 6))
    manager.reserve(seq, 6)
    with rejected(manager, CommitError, 77):
        manager.commit(seq, [5000, 5001, 77, 5003, 5004, 5005])
    manager.commit(seq, run(5000, 6))


def test_a_commit_before_its_copy_was_taken_is_refused():
    manager = CacheManager(num_blocks=8, block_size=4)
    twin = manager.fork(prefill(manager, run(0, 6)))
    manager.reserve(twin, 1)
    with rejected(manager, CopyError):
        manager.commit(twin, [9])
    assert len(manager.take_copies()) == 1
    manager.commit(twin, [9])


@pytest.mark.parametrize("who", ["a reader", "a branch", "a pin"])
def test_a_published_block_that_something_else_uses_cannot_be_cut(who):
    manager = CacheManager(num_blocks=16, block_size=4)
    seq = prefill(manager, run(5000, 8))
    if who == "a reader":
        assert manager.open(run(5000, 9)).num_cached == 8
    elif who == "a branch":
        serve(manager, [*run(5000, 8), 1, 2, 3, 4])
    else:
        assert ops.pin(manager, run(5000, 8)).num_tokens == 8
    with rejected(manager, TruncateError, 6):
        ops.truncate(manager, seq, 6)


def test_a_request_that_is_refused_begins_no_session():
    manager = CacheManager(num_blocks=4, block_size=4)
    with rejected(manager, OutOfBlocks):
        manager.open(run(0, 20), hint=Hint("session", session_id="a"))
    assert manager.end_session("a") == 0


# -- without room --------------------------------------------------------------------------


def test_a_reservation_beyond_the_pool_says_what_there_is(stage):
    manager = stage.manager
    free, cached, active = manager.num_free, manager.num_cached, manager.num_active
    with rejected(manager, OutOfBlocks, "free", free, "cached", cached, active) as caught:
        manager.reserve(stage.seq, 4 * 16)
    error = caught.value
    assert (error.free, error.cached, error.active) == (free, cached, active)
    assert error.needed > free + cached


def test_a_step_beyond_the_pool_reserves_for_nobody():
    manager = CacheManager(num_blocks=4, block_size=4)
    seqs = [prefill(manager, run(1000 * i, 4)) for i in range(3)]
    for steps in (manager.batch(seqs), seqs):
        with rejected(manager, OutOfBlocks):
            manager.reserve_step(steps)
    assert [seq.capacity for seq in seqs] == [4, 4, 4]


def test_more_pinned_than_there_is_room_for_fails_fast():
    manager = CacheManager(num_blocks=4, block_size=4, pin_budget=1.0)
    serve(manager, run(0, 16))
    pin = ops.pin(manager, run(0, 16))
    seq = manager.open(run(1000, 4))
    with rejected(manager, OutOfBlocks):
        manager.reserve(seq, 4)
    assert ops.reclaim(manager, 4) == 0
    pin.close()
    manager.reserve(seq, 4)
    with rejected(manager, PinError):
        pin.close()


@pytest.mark.parametrize("kind", [FullAttention(), SlidingWindow(8)])
def test_a_refusal_leaves_pins_as_they_are_whose_time_has_run_out(kind):
    clock = Clock()
    groups = [LayerGroup("full", 8), LayerGroup("other", 8, kind)]
    manager = CacheManager(groups=groups, block_size=4, pin_budget=0.5, clock=clock)
    serve(manager, run(0, 16))
    serve(manager, run(1000, 16))
    ops.pin(manager, run(0, 8), ttl_s=5)
    lasting = ops.pin(manager, run(1000, 4))
    seq = manager.open(run(2000, 4))
    clock.now += 6
    with rejected(manager, OutOfBlocks):
        manager.reserve(seq, 32)
    with rejected(manager, PinBudgetExceeded):
        ops.resize(manager, {"full": 1})
    with rejected(manager, OutOfBlocks):
        restore(manager, run(3000, 32), 8, {0: range(8), 1: range(8)})
    assert ops.snapshot(manager)["num_pins"] == 2
    manager.reserve(seq, 24)
    assert ops.snapshot(manager)["num_pins"] == 1
    lasting.close()


def test_a_pin_above_the_budget_is_refused():
    manager = CacheManager(num_blocks=8, block_size=4, pin_budget=0.5)
    serve(manager, run(0, 20))
    with rejected(manager, PinBudgetExceeded, 5, 4):
        ops.pin(manager, run(0, 20))
    assert ops.pin(manager, run(0, 16)).num_tokens == 16


def test_after_every_refusal_the_manager_still_works(stage):
    manager = stage.manager
    for bad in ([], [-1], [2**31], "x"):
        with rejected(manager, TokensError):
            manager.open(bad)
    seq = prefill(manager, run(7500, 10))
    generate(manager, seq, [1, 2, 3])
    manager.close(seq)
    assert found(manager, [*run(7500, 10).tolist(), 1, 2, 3]) == 12


@pytest.mark.parametrize("media", [np.zeros(2), np.zeros(0), {}, "image", 5, None])
def test_media_that_are_no_list_are_refused_and_bar_nothing(media):
    manager = CacheManager(num_blocks=8, block_size=4)
    prompt = list(range(9))
    calls = (
        lambda: manager.probe(prompt, media=media),
        lambda: manager.open(prompt, media=media),
        lambda: ops.pin(manager, prompt, media=media),
        lambda: ops.invalidate(manager, prompt, media=media),
        lambda: restore(manager, prompt, 2, {0: [0, 1]}, media=media),
    )
    for call in calls:
        with pytest.raises(MediaError, match="must be a list or tuple"):
            call()
    manager.close(manager.open(prompt))
    ops.check(manager)
