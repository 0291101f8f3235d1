"""Speculation: chains and trees of drafts, what an accept moves, and what a wrong one changes."""

import pytest
from core_help import generate, prefill, rejected, run
from hybrid_help import BLOCK, Ledger, conserved, make

from quire import errors, ops
from quire.core import CacheManager, FullAttention
from quire.groups import ChunkedAttention, Recurrent, SlidingWindow, checkpoint
from quire.ops import TokenMove

FULL = FullAttention()
TREE = [-1, -1, 0, 1, 1, 3]  # two roots; 0 -> 2; 1 -> 3 -> 5 and 1 -> 4
KINDS = [(FULL,), (FULL, SlidingWindow(5)), (FULL, ChunkedAttention(6)), (SlidingWindow(3),)]


@pytest.fixture
def manager():
    return CacheManager(num_blocks=32, block_size=BLOCK, sub_block=False)


def branch(parents, draft):
    """Return the drafts from a root to `draft`."""
    path = [draft]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def speculate(ledger, seq, parents):
    """Reserve a draft tree and compute it: draft i is token 900 + i, at `computed + i`."""
    draft = ops.draft(ledger.manager, seq, parents)
    ledger.copy()
    before = tuple(seq.tokens.tolist())
    for i in range(len(parents)):
        tokens = [900 + draft for draft in branch(parents, i)]
        ledger.write(seq, len(before) + i, (seq.scope, *before, *tokens))
    return draft


def accept(ledger, draft, path):
    """Accept drafts and do their moves; return the moves."""
    moves = draft.accept(path, [900 + at for at in path])
    ledger.move(moves)
    return moves


# -- what a draft reserves -----------------------------------------------------------------


@pytest.mark.parametrize(("parents", "room"), [(3, 3), (1, 1), (TREE, 6), ([-1], 1)])
def test_a_draft_reserves_room_for_all_its_tokens(manager, parents, room):
    seq = prefill(manager, run(0, 6))
    ops.draft(manager, seq, parents)
    assert (seq.computed, seq.capacity) == (6, 6 + room)
    assert len(seq.block_ids()) == -(-(6 + room) // BLOCK)


def test_a_draft_is_not_published(manager):
    seq = prefill(manager, run(0, 6))
    ops.draft(manager, seq, TREE)
    assert manager.probe(run(0, 20)).num_tokens == 4


# -- accepting -----------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", range(5))
def test_of_a_chain_the_accepted_head_stays_where_it_is(manager, accepted):
    ledger = Ledger(manager)
    seq = ledger.prefill(run(0, 6))
    draft = ops.draft(manager, seq, 4)
    ledger.forward(seq, [900, 901, 902, 903])
    path = list(range(accepted))
    assert accept(ledger, draft, path) == []
    assert (seq.computed, seq.capacity) == (6 + accepted, 6 + accepted)
    assert seq.tokens.tolist() == [*range(6), *[900 + i for i in path]]
    ledger.check(seq)
    assert conserved(manager)


def test_the_tokens_of_a_branch_move_together():
    manager = CacheManager(num_blocks=32, block_size=BLOCK)
    seq = prefill(manager, run(0, 6))
    draft = ops.draft(manager, seq, TREE)
    table = seq.block_ids().tolist()
    moves = draft.accept([1, 3, 5], [901, 903, 905])
    # positions 7, 9, 11 become 6, 7, 8
    assert moves == [
        TokenMove(0, table[1], 3, table[1], 2),
        TokenMove(0, table[2], 1, table[1], 3),
        TokenMove(0, table[2], 3, table[2], 0),
    ]
    assert seq.tokens.tolist() == [*range(6), 901, 903, 905]
    assert (seq.computed, seq.capacity, seq.published) == (9, 9, 8)


def test_a_token_that_is_in_place_does_not_move(manager):
    seq = prefill(manager, run(0, 4))
    draft = ops.draft(manager, seq, TREE)
    (block,) = seq.block_ids().tolist()[1:2]
    assert draft.accept([0, 2], [900, 902]) == [TokenMove(0, block, 2, block, 1)]


def test_accepting_nothing_gives_the_room_back(manager):
    seq = prefill(manager, run(0, 6))
    before = manager.num_free
    draft = ops.draft(manager, seq, TREE)
    assert draft.accept([], []) == []
    assert (seq.computed, seq.capacity, manager.num_free) == (6, 6, before)


def test_an_accepted_block_that_is_cached_already_gives_way(manager):
    ledger = Ledger(manager)
    manager.close(ledger.prefill([*run(0, 6).tolist(), 901, 903]))
    seq = ledger.prefill(run(0, 6))
    draft = speculate(ledger, seq, TREE)
    accept(ledger, draft, [1, 3])
    ledger.check(seq)
    assert manager.num_active == 2
    assert conserved(manager)


def test_moves_are_asked_for_in_every_group():
    manager = make(("full", 32, FULL), ("sliding", 32, SlidingWindow(5)))
    seq = prefill(manager, run(0, 6))
    draft = ops.draft(manager, seq, TREE)
    moves = draft.accept([1, 4], [901, 904])
    places = {
        group: [(m.src_offset, m.dst_offset) for m in moves if m.group == group] for group in (0, 1)
    }
    assert places[0] == places[1] == [(3, 2), (2, 3)]


def test_a_chain_of_parents_is_a_chain(manager):
    seq = prefill(manager, run(0, 6))
    draft = ops.draft(manager, seq, [-1, 0, 1])
    assert draft.accept([0, 1], [900, 901]) == []
    assert seq.computed == 8


def test_a_draft_is_dropped_by_a_truncate(manager):
    seq = prefill(manager, run(0, 6))
    draft = ops.draft(manager, seq, TREE)
    ops.truncate(manager, seq, 6)
    with rejected(manager, errors.DraftError):
        draft.accept([0], [900])


DROPPED = {
    "truncated": lambda m, seq, _: ops.truncate(m, seq, 6),
    "committed and truncated": lambda m, seq, _: (m.commit(seq, [900]), ops.truncate(m, seq, 6)),
    "suspended": lambda m, seq, _: (m.suspend(seq), m.resume(seq), generate(m, seq, run(4, 2))),
    "drafted again": lambda m, seq, _: (
        ops.truncate(m, seq, 6),
        ops.draft(m, seq, 2),
        ops.truncate(m, seq, 6),
    ),
    "accepted": lambda m, seq, draft: draft.accept([], []),
}


@pytest.mark.parametrize("dropped", DROPPED)
def test_a_draft_that_was_dropped_is_not_accepted_in_room_reserved_later(manager, dropped):
    seq = prefill(manager, run(0, 6))
    draft = ops.draft(manager, seq, TREE)
    DROPPED[dropped](manager, seq, draft)
    assert seq.computed == 6
    manager.reserve(seq, len(TREE))
    with rejected(manager, errors.DraftError):
        draft.accept([0], [900])


def test_a_linear_draft_needs_no_draft_call(manager):
    ledger = Ledger(manager)
    seq = ledger.prefill(run(0, 6))
    manager.reserve(seq, 4)
    ledger.forward(seq, [900, 901, 902, 903])
    manager.commit(seq, [900, 901])
    ops.truncate(manager, seq, seq.computed)
    assert (seq.computed, seq.capacity) == (8, 8)
    ledger.generate(seq, [7])
    ledger.check(seq)


# -- recurrent groups ----------------------------------------------------------------------


def test_a_tree_of_drafts_is_refused_by_a_recurrent_group():
    manager = make(("full", 32, FULL), ("states", 4, Recurrent()))
    seq = prefill(manager, run(0, 6))
    with rejected(manager, errors.DraftError):
        ops.draft(manager, seq, TREE)


@pytest.mark.parametrize("call", [CacheManager.fork, checkpoint])
@pytest.mark.parametrize("length", [6, 8])
def test_a_state_that_has_gone_on_with_drafts_is_not_copied(call, length):
    manager = make(("full", 32, FULL), ("states", 4, Recurrent()))
    seq = prefill(manager, run(0, length))
    draft = ops.draft(manager, seq, 3)
    with rejected(manager, errors.DraftError, "3 drafts", "accept"):
        call(manager, seq)
    draft.accept([0, 1], [900, 901])
    assert manager.fork(seq).computed == length + 2


# -- refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [[2], [0, 3], [1, 2], [1, 5], [3, 1], [1, 1], [6], [-1], [0, 1], [1, 3, 4], [1.5], ["0"]],
)
def test_a_path_that_is_no_branch_is_refused_and_changes_nothing(manager, path):
    seq = prefill(manager, run(0, 6))
    draft = ops.draft(manager, seq, TREE)
    with rejected(manager, errors.DraftError):
        draft.accept(path, [900] * len(path))
    assert draft.accept([1, 3], [901, 903])


@pytest.mark.parametrize("token_ids", [[], [901], [901, 903, 905]])
def test_a_path_takes_one_token_for_each_draft(manager, token_ids):
    seq = prefill(manager, run(0, 6))
    draft = ops.draft(manager, seq, TREE)
    with rejected(manager, errors.DraftError):
        draft.accept([1, 3], token_ids)


@pytest.mark.parametrize("token_ids", [[901, -1], [901, 2**31], [1.5, 2.5], [[1], [2]]])
def test_accepted_tokens_are_token_ids(manager, token_ids):
    seq = prefill(manager, run(0, 6))
    draft = ops.draft(manager, seq, TREE)
    with rejected(manager, errors.TokensError):
        draft.accept([1, 3], token_ids)


@pytest.mark.parametrize(
    "parents",
    [[0], [-1, 1], [-1, 2, 0], [-2], [-1, 0.5], ["root"], [None], 0, -1, 1.5, "3", None, True],
)
def test_a_draft_tree_names_earlier_drafts_as_parents(manager, parents):
    seq = prefill(manager, run(0, 6))
    with rejected(manager, errors.DraftError):
        ops.draft(manager, seq, parents)


def test_a_path_of_a_draft_is_accepted_once(manager):
    seq = prefill(manager, run(0, 6))
    draft = ops.draft(manager, seq, 3)
    assert draft.is_waiting
    draft.accept([0], [900])
    assert not draft.is_waiting
    with rejected(manager, errors.DraftError):
        draft.accept([1], [901])


def test_the_room_of_one_draft_is_not_accepted_by_the_handle_of_another(manager):
    seq = prefill(manager, run(0, 6))
    old = ops.draft(manager, seq, TREE)
    ops.truncate(manager, seq, 6)
    new = ops.draft(manager, seq, 6)
    with rejected(manager, errors.DraftError):
        old.accept([1, 3], [901, 903])
    assert new.accept([0], [900]) == []


def test_an_accept_before_the_copies_were_taken_is_refused(manager):
    seq = prefill(manager, run(0, 6))
    twin = manager.fork(seq)
    draft = ops.draft(manager, twin, TREE)
    with rejected(manager, errors.CopyError):
        draft.accept([1, 3], [901, 903])
    manager.take_copies()
    draft.accept([1, 3], [901, 903])


def test_accepted_tokens_that_contradict_the_prompt_are_refused(manager):
    seq = manager.open(run(0, 6))
    manager.reserve(seq, 6)
    manager.commit(seq, run(0, 4))
    try:
        draft = ops.draft(manager, seq, 2)
    except errors.SequenceError:
        return  # the rest of a prompt is no draft: refused at once
    with rejected(manager, errors.CommitError):
        draft.accept([0, 1], [4, 99])
