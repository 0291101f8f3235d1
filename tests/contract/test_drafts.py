"""Speculation: a line of drafts in reserved room, of which the accepted head is committed."""

import pytest
from core_help import prefill, rejected, run
from hybrid_help import BLOCK, FULL, Ledger, conserved, make

from quire import errors, ops
from quire.core import CacheManager
from quire.groups import ChunkedAttention, Recurrent, SlidingWindow

DRAFTS = [900, 901, 902, 903]
KINDS = [
    (FULL,),
    (FULL, SlidingWindow(5)),
    (FULL, ChunkedAttention(6)),
    (SlidingWindow(3),),
    (FULL, Recurrent()),
]


@pytest.fixture
def manager():
    return CacheManager(num_blocks=32, block_size=BLOCK, sub_block=False)


def accept(ledger, seq, num_accepted):
    """Commit the head of the drafts, with the states that stand there, and give the other room back."""
    states = [group for group, kind in enumerate(ledger.kinds) if isinstance(kind, Recurrent)]
    accepted = DRAFTS[:num_accepted]
    for group in states:
        (block,) = seq.block_ids(group).tolist()
        ledger.memory[group][block, 0] = (seq.scope, *seq.tokens.tolist(), *accepted)
    ledger.manager.commit(seq, accepted)
    ops.truncate(ledger.manager, seq, seq.computed)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("num_accepted", range(5))
@pytest.mark.parametrize("length", [6, 8])
def test_of_a_line_of_drafts_the_accepted_head_stays_where_it_is(kinds, num_accepted, length):
    manager = make(*((f"g{i}", 32, kind) for i, kind in enumerate(kinds)))
    ledger = Ledger(manager)
    seq = ledger.prefill(run(0, length))
    manager.reserve(seq, 4)
    ledger.forward(seq, DRAFTS)
    accept(ledger, seq, num_accepted)
    assert (seq.computed, seq.capacity) == (length + num_accepted, length + num_accepted)
    assert seq.tokens.tolist() == [*range(length), *DRAFTS[:num_accepted]]
    ledger.check(seq)
    ledger.generate(seq, [7, 8, 9])
    ledger.check(seq)
    assert conserved(manager)


def test_a_draft_is_not_published(manager):
    seq = prefill(manager, run(0, 6))
    manager.reserve(seq, 6)
    assert manager.probe([*run(0, 6), *DRAFTS]).num_tokens == 4


def test_accepting_nothing_gives_the_room_back(manager):
    seq = prefill(manager, run(0, 6))
    before = manager.num_free
    manager.reserve(seq, 6)
    ops.truncate(manager, seq, seq.computed)
    assert (seq.computed, seq.capacity, manager.num_free) == (6, 6, before)


def test_an_accepted_block_that_is_cached_already_gives_way(manager):
    ledger = Ledger(manager)
    manager.close(ledger.prefill([*run(0, 6).tolist(), *DRAFTS[:2]]))
    seq = ledger.prefill(run(0, 6))
    manager.reserve(seq, 4)
    ledger.forward(seq, DRAFTS)
    accept(ledger, seq, 2)
    ledger.check(seq)
    assert manager.num_active == 2
    assert conserved(manager)


def test_drafts_are_not_committed_before_the_copies_were_taken(manager):
    seq = prefill(manager, run(0, 6))
    twin = manager.fork(seq)
    manager.reserve(twin, 4)
    with rejected(manager, errors.CopyError):
        manager.commit(twin, DRAFTS[:2])
    manager.take_copies()
    manager.commit(twin, DRAFTS[:2])


def test_drafts_that_contradict_the_prompt_are_refused(manager):
    seq = manager.open(run(0, 6))
    manager.reserve(seq, 6)
    manager.commit(seq, run(0, 4))
    with rejected(manager, errors.CommitError):
        manager.commit(seq, [4, 99])
