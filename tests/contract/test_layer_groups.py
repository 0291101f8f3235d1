"""Layer groups: what each kind needs of a hit, and how kinds agree on one."""

import pytest
from core_help import found, generate, prefill, rejected, run, serve, state
from hybrid_help import (
    BLOCK,
    FULL,
    Ledger,
    conserved,
    counts,
    held,
    make,
    prefill_in_pieces,
    serve_in_pieces,
    squeeze,
)

from quire import errors, groups, ops
from quire.core import CacheManager, FullAttention, Kind, LayerGroup
from quire.groups import ChunkedAttention, Recurrent, SlidingWindow, WindowKind
from quire.groups.states import SnapshotGroup

# -- settings ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
@pytest.mark.parametrize(
    "kind",
    [
        SlidingWindow,
        ChunkedAttention,
        lambda value: SlidingWindow(8, interval=value),
        lambda value: Recurrent(interval=value),
    ],
)
def test_windows_chunks_and_intervals_are_positive_integers(kind, value):
    with pytest.raises(errors.ConfigError, match=str(value)):
        make(("g", 8, kind(value)))


@pytest.mark.parametrize("kind", [SlidingWindow, ChunkedAttention])
def test_only_an_interval_may_be_left_out(kind):
    with pytest.raises(errors.ConfigError, match="None"):
        make(("g", 8, kind(None)))


@pytest.mark.parametrize("sinks", [-1, 9, 1.5, "2", None, True])
def test_sinks_are_at_most_the_window(sinks):
    with pytest.raises(errors.ConfigError, match=str(sinks)):
        make(("g", 8, SlidingWindow(8, sinks=sinks)))


@pytest.mark.parametrize("kind", ["full", None, 8, FullAttention, Kind()])
def test_a_kind_is_one_of_the_kinds(kind):
    with pytest.raises(errors.ConfigError):
        make(("g", 8, kind))


def test_a_group_is_of_full_attention_unless_it_says_otherwise():
    assert LayerGroup("g", 8).kind == FullAttention()
    assert SlidingWindow(8) == SlidingWindow(8, sinks=0, interval=None)


# -- hits ----------------------------------------------------------------------------------

ALL = [
    ("full", 64, FULL),
    ("sliding", 64, SlidingWindow(10)),
    ("sinks", 64, SlidingWindow(6, sinks=5)),
    ("chunked", 64, ChunkedAttention(12)),
]


def test_a_full_group_refuses_a_length_with_one_block_missing():
    manager = make(("full", 10, FULL), ("sliding", 64, SlidingWindow(4)), sub_block=False)
    serve(manager, run(0, 8 * BLOCK))
    squeeze(manager, 1000, 5)
    assert found(manager, run(0, 8 * BLOCK)) == 5 * BLOCK
    assert conserved(manager)


def squeezed():
    """A prompt of 8 blocks of which sliding lost blocks 0 and 3, and chunked blocks 0 to 5."""
    manager = make(
        ("full", 64, FULL),
        ("sliding", 14, SlidingWindow(8, interval=12)),
        ("chunked", 10, ChunkedAttention(12)),
        sub_block=False,
    )
    serve(manager, run(0, 32))
    squeeze(manager, 1000, 8)
    assert conserved(manager)
    return manager


@pytest.mark.parametrize(
    ("length", "accepted"), [(32, 32), (28, 28), (24, 24), (20, 12), (16, 12), (12, 12), (8, 0)]
)
def test_a_hit_is_the_largest_length_that_all_groups_accept(length, accepted):
    manager = squeezed()
    assert found(manager, run(0, length)) == accepted
    seq = manager.open([*run(0, length).tolist(), 777])
    assert seq.num_cached == accepted


def test_the_groups_agree_only_after_several_rounds():
    manager = make(
        ("sliding", 8, SlidingWindow(4, interval=8)),
        ("chunked", 6, ChunkedAttention(12)),
        sub_block=False,
    )
    serve_in_pieces(manager, run(0, 32), 4)
    squeeze(manager, 1000, 4)
    # sliding keeps blocks 1, 3, 5, 7: lengths 8, 16, 24, 32; chunked keeps 6, 7: 12, 24, 28, 32
    assert found(manager, run(0, 32)) == 32
    assert found(manager, run(0, 28)) == 24
    assert found(manager, run(0, 20)) == 0


def test_sub_block_reuse_needs_the_block_in_every_group():
    manager = make(("full", 64, FULL), ("sliding", 10, SlidingWindow(8, interval=16)))
    serve(manager, run(0, 32))
    prompt = [*run(0, 18).tolist(), 777]
    hit = manager.probe(prompt)
    assert (hit.num_tokens, hit.partial_tokens) == (18, 2)
    squeeze(manager, 1000, 6)
    hit = manager.probe(prompt)
    assert (hit.num_tokens, hit.partial_tokens) == (16, 0)


def test_the_shared_head_of_a_block_is_copied_in_every_group():
    manager = make(("full", 64, FULL), ("sliding", 64, SlidingWindow(8)))
    ledger = Ledger(manager)
    manager.close(ledger.prefill(run(0, 32)))
    seq = manager.open([*run(0, 18).tolist(), 777])
    assert sorted((copy.group, copy.num_tokens) for copy in ledger.copy()) == [(0, 2), (1, 2)]
    ledger.check(seq)


def test_without_room_for_the_copy_in_one_group_a_request_waits():
    manager = make(("full", 64, FULL), ("sliding", 8, SlidingWindow(32)))
    seq = prefill(manager, run(0, 32))
    reader = manager.open([*run(0, 18).tolist(), 777])
    assert reader.num_cached == 18
    with rejected(manager, errors.OutOfBlocks):
        manager.reserve(reader, 1)
    ops.admit(manager, reader)
    assert (reader.num_cached, reader.computed) == (16, 16)
    manager.close(seq)
    ops.check(manager)


# -- models without a full group -----------------------------------------------------------


def test_a_model_of_sliding_layers_alone_computes_more_than_its_pool():
    kind = SlidingWindow(8)
    manager = make(("sliding", 8, kind))
    serve_in_pieces(manager, run(0, 400), 8)
    assert conserved(manager)
    assert found(manager, run(0, 400)) == 400


# -- kinds from outside --------------------------------------------------------------------


class Stepped(WindowKind, frozen=True):
    """A window of 8 tokens that moves on by whole steps."""

    step: int

    @property
    def span(self):
        return 8 + self.step

    def first_block(self, num_tokens, block_size):
        return max(num_tokens - 8, 0) // self.step * self.step // block_size

    def check(self, name):
        if self.step < 1:
            raise errors.ConfigError(f"step of group {name!r} is {self.step}")


class Doubling(Kind, frozen=True):
    """A state of which snapshots are kept at the powers of two."""

    def group(self, site):
        return DoublingGroup(site, None)

    def blocks_for(self, num_tokens, block_size):
        return num_tokens.bit_length()


class DoublingGroup(SnapshotGroup):
    def due(self, start, stop):
        return [1 << power for power in range(20) if 4 <= 1 << power < stop]


def test_a_kind_from_outside_checks_itself_and_makes_its_group():
    with pytest.raises(errors.ConfigError, match="step of group 'g' is 0"):
        make(("g", 8, Stepped(0)))
    manager = make(("full", 64, FULL), ("stepped", 12, Stepped(12)), sub_block=False)
    seq = prefill(manager, run(0, 40))
    assert held(seq, 1) == [6, 7, 8, 9]
    manager.close(seq)
    squeeze(manager, 1000, 8)
    assert [found(manager, run(0, n)) for n in (40, 36, 32, 28)] == [40, 36, 32, 0]
    assert conserved(manager)


def test_states_are_kept_where_a_kind_from_outside_says():
    manager = make(("full", 64, FULL), ("states", 8, Doubling()))
    seq = manager.open(run(0, 40))
    assert groups.stops(manager, seq) == [4, 8, 16, 32, 36]
    manager.close(seq)
    serve_in_pieces(manager, run(0, 40))
    assert [found(manager, run(0, n)) for n in (40, 36, 32, 28, 16)] == [36, 36, 32, 16, 16]


# -- counting ------------------------------------------------------------------------------


def test_a_length_that_only_a_window_refuses_is_missed_for_the_window():
    manager = make(
        ("full", 64, FULL), ("sliding", 10, SlidingWindow(8, interval=16)), sub_block=False
    )
    serve(manager, run(0, 32))
    squeeze(manager, 1000, 6)
    prompt = [*run(0, 24).tolist(), 777, 778]
    hit = manager.probe(prompt)
    assert (hit.num_tokens, hit.reason) == (16, "window")
    explanation = ops.explain(manager, prompt)
    missed = [part for part in explanation.segments if not part.cached]
    assert (missed[0].start, missed[0].stop, missed[0].why) == (16, 24, "window")
    before = manager.stats.missed
    manager.reserve(manager.open(prompt), 1)
    after = manager.stats.missed
    assert after["window"] - before["window"] == 8
    assert manager.stats.hit_tokens + sum(after.values()) == manager.stats.prompt_tokens


def test_a_length_without_a_state_is_missed_for_the_window():
    manager = make(("full", 64, FULL), ("states", 8, Recurrent()))
    serve_in_pieces(manager, run(0, 30))
    hit = manager.probe([*run(0, 16).tolist(), 777])
    assert (hit.num_tokens, hit.reason) == (0, "window")


def test_two_managers_of_several_groups_decide_alike():
    def history():
        manager = make(
            ("full", 30, FULL),
            ("sliding", 12, SlidingWindow(6, interval=12)),
            ("states", 6, Recurrent(interval=8)),
        )
        states = []
        for i in range(60):
            serve_in_pieces(manager, run(1000 * (i * i % 7), 5 + i % 3 * 9), 7, priority=i % 2)
            states.append(state(manager))
        return states

    assert history() == history()


# -- refusals ------------------------------------------------------------------------------


def test_a_full_pool_too_small_for_the_prompt_refuses_it():
    manager = make(("full", 4, FULL), ("sliding", 64, SlidingWindow(8)))
    with rejected(manager, errors.OutOfBlocks):
        manager.open(run(0, 17))


def test_a_manager_of_one_full_group_behaves_as_one_without_groups():
    def history(manager):
        states = []
        for i in range(40):
            seq = prefill_in_pieces(manager, run(1000 * (i * i % 7), 5 + i % 3 * 9), 7)
            generate(manager, seq, [1, 2, 3])
            manager.close(seq)
            states.append((found(manager, run(0, 30)), counts(manager, 0)))
        return states

    one = CacheManager(num_blocks=12, block_size=BLOCK)
    assert history(one) == history(make(("full", 12, FULL)))


@pytest.mark.parametrize("group", ["full", "sliding", "state"])
def test_a_shortage_says_which_group_lacks_what(group):
    sizes = {"full": 10, "sliding": 10, "state": 3} | {group: 2}
    manager = make(
        ("full", sizes["full"], FullAttention()),
        ("sliding", sizes["sliding"], SlidingWindow(8)),
        ("state", sizes["state"], Recurrent()),
    )
    running = [prefill(manager, run(1000 * i, BLOCK)) for i in range(2)]
    waiting = manager.open(run(5000, BLOCK))
    with rejected(
        manager, errors.OutOfBlocks, f"group {group!r}", "2 blocks", "2 active"
    ) as caught:
        manager.reserve(waiting, BLOCK)
    error = caught.value
    assert (error.group, error.needed, error.free, error.active) == (group, 1, 0, 2)
    assert len(running) == 2
