"""A paged cache for retrieval, feature by feature, in quire.

allocator    pages held, free, allocated and freed so far, fragmentation; a compaction that moves
sequences    attach, detach, get
sharing      documents in front of many questions; copy-on-write; repeated prompts held once
figures      sequences, pages, shares, shared pages, references
speculation  drafts written ahead, accepted or dropped, as a chain and as a tree
"""

import pytest
from ancestors_help import BLOCK, Engine, counts, kv_of, run, same, torch

from quire import CacheManager
from quire.errors import DraftError, SequenceError
from quire.tensors import gather, scatter


@pytest.fixture
def manager():
    return CacheManager(num_blocks=32, block_size=BLOCK)


@pytest.fixture
def engine(manager):
    return Engine(manager)


def ask(document, question):
    """Return a prompt: a document first, then a question of five tokens."""
    return [*document.tolist(), *run(question, 5).tolist()]


# -- the allocator -------------------------------------------------------------------------


def test_the_allocator_counts_pages_held_free_allocated_and_freed(manager, engine):
    seq = engine.prefill(run(0, 20))
    engine.serve(run(1000, 10))
    usage = manager.usage()
    assert (usage.num_blocks, usage.active, usage.cached, usage.free) == (32, 5, 2, 25)
    assert (usage.allocations, usage.frees) == (8, 1)
    manager.close(seq)
    manager.clear()
    usage = manager.usage()
    assert (usage.active, usage.cached, usage.free) == (0, 0, 32)
    assert (usage.allocations, usage.frees) == (8, 8)


def fragmented(manager, engine):
    """Return three running sequences of six, and a cached document; the gaps between are free."""
    seqs = [engine.prefill(run(1000 * i, 14)) for i in range(6)]
    document = run(9000, 8)
    engine.serve(document)
    for i in (0, 2, 3):
        manager.close(seqs[i])
        manager.evict(run(1000 * i, 4))
    return [seqs[i] for i in (1, 4, 5)], document


def test_fragmentation_is_the_share_of_the_span_of_held_pages_that_is_free(manager, engine):
    seqs, _ = fragmented(manager, engine)
    held = sum(seq.num_blocks for seq in seqs) + 2
    last = max(max(seq.block_ids()) for seq in seqs)
    usage = manager.usage()
    assert usage.span > last
    assert usage.fragmentation == pytest.approx(1 - held / usage.span)
    assert usage.fragmentation > 0.4


def test_compaction_moves_pages_and_tables_and_every_sequence_reads_its_own(manager, engine):
    seqs, document = fragmented(manager, engine)
    before = [seq.block_ids().tolist() for seq in seqs]
    moved = manager.compact()
    copies = engine.copy()
    engine.pool.poison(manager.pools[0].free_ids())  # nothing may be read where it was
    assert len(copies) == moved > 0
    assert [seq.block_ids().tolist() for seq in seqs] != before
    usage = manager.usage()
    assert (usage.fragmentation, usage.span) == (0, 14)
    assert all(engine.reads_its_own(seq) for seq in seqs)
    reader = engine.prefill(ask(document, 500))
    assert reader.num_cached == 8
    for seq in (*seqs, reader):
        engine.compute(seq, [7, 8, 9])
        assert engine.reads_its_own(seq)
    counts(manager)


# -- sequences -----------------------------------------------------------------------------


def test_a_sequence_is_attached_read_and_detached(manager, engine):
    seq = engine.prefill(run(0, 10))
    read = gather(engine.pool, seq.block_ids(), seq.computed)
    assert same(read, kv_of(run(0, 10)))
    assert read[0][0].shape == (2, 10, 4)
    manager.close(seq)
    assert list(manager.sequences.values()) == []
    with pytest.raises(SequenceError, match="was closed already"):
        manager.close(seq)


# -- sharing -------------------------------------------------------------------------------


def test_questions_about_one_document_share_its_pages(manager, engine):
    document = run(0, 16)
    asked = [engine.prefill(ask(document, 1000 * i)) for i in range(1, 5)]
    assert [seq.num_cached for seq in asked] == [0, 16, 16, 16]
    assert len({tuple(seq.block_ids()[:4].tolist()) for seq in asked}) == 1
    assert counts(manager) == (32 - 4 - 4 * 2, 4 + 4 * 2, 0)
    assert all(engine.reads_its_own(seq) for seq in asked)


def test_a_shared_page_is_copied_before_the_first_write_into_it(manager, engine):
    seq = engine.prefill(run(0, 10))
    twin = manager.fork(seq)
    assert twin.block_ids().tolist() == seq.block_ids().tolist()
    assert manager.usage().shared_blocks == 3
    engine.compute(twin, [70, 71])
    engine.compute(seq, [80, 81])
    assert manager.stats.copied_blocks == 1
    assert seq.block_ids()[:2].tolist() == twin.block_ids()[:2].tolist()
    assert seq.block_ids()[2] != twin.block_ids()[2]
    assert engine.reads_its_own(seq)
    assert engine.reads_its_own(twin)


def test_a_prompt_that_leaves_another_inside_a_page_gets_the_shared_head_by_a_copy(manager, engine):
    engine.serve(run(0, 12))
    seq = engine.prefill([*run(0, 10).tolist(), 99, 98, 97])
    assert seq.num_cached == 10
    assert engine.reads_its_own(seq)
    again = engine.prefill(run(0, 13))
    assert again.num_cached == 12
    assert engine.reads_its_own(again)


def test_a_copy_of_a_page_that_waits_for_its_own_copy_reads_the_origin(manager, engine):
    engine.serve(run(0, 12))
    seq = manager.open([*run(0, 10).tolist(), 99])
    twin = manager.fork(seq)
    manager.reserve(twin, 1)
    assert len(engine.copy()) == 2
    for each in (seq, twin):
        engine.compute(each, [99])
        assert engine.reads_its_own(each)


def test_a_system_prompt_that_two_requests_compute_at_once_is_held_once(manager, engine):
    prompts = [ask(run(0, 16), 1000), ask(run(0, 16), 2000)]
    seqs = [manager.open(prompt) for prompt in prompts]
    for seq, prompt in zip(seqs, prompts, strict=True):
        manager.reserve(seq, len(prompt))
    assert counts(manager) == (20, 12, 0)
    for seq, prompt in zip(seqs, prompts, strict=True):
        engine.compute(seq, prompt)
    assert manager.stats.deduplicated_blocks == 4
    assert seqs[0].block_ids()[:4].tolist() == seqs[1].block_ids()[:4].tolist()
    assert counts(manager) == (24, 8, 0)
    assert all(engine.reads_its_own(seq) for seq in seqs)


# -- figures -------------------------------------------------------------------------------


def test_sequences_pages_shares_shared_pages_and_references_are_counted(manager, engine):
    for i in range(1, 4):
        engine.prefill(ask(run(0, 16), 1000 * i))
    usage = manager.usage()
    assert usage.num_sequences == 3
    assert usage.active == 4 + 3 * 2
    assert usage.shared_blocks == 4
    assert usage.references == 3 * 6
    assert usage.references - usage.active == 2 * 4  # pages that sharing saved
    assert manager.stats.hit_tokens == 2 * 16
    assert (usage.used_tokens, usage.room_tokens) == (3 * 21, 3 * 24)
    assert usage.padding == pytest.approx(1 - 63 / 72)


# -- speculation ---------------------------------------------------------------------------


def write_drafts(engine, seq, parents, token_ids):
    """Write each draft's KV as a model with a tree mask would: after its own ancestors."""
    for at, token in enumerate(token_ids):
        path, above = [int(token)], parents[at]
        while above >= 0:
            path.append(int(token_ids[above]))
            above = parents[above]
        tokens = [*seq.tokens.tolist(), *reversed(path)]
        place = seq.computed + at
        scatter(engine.pool, seq.block_ids(), place, kv_of(tokens, len(tokens) - 1))


def speculate(engine, seq, parents, token_ids, path):
    """Draft a tree, compute it, and accept a path of it; return the moves that were done."""
    engine.manager.draft(seq, parents)
    engine.copy()
    write_drafts(engine, seq, parents, token_ids)
    moves = engine.manager.accept(seq, path, [token_ids[at] for at in path])
    engine.move(moves)
    return moves


def test_accepted_drafts_of_a_chain_stay_where_they_are_and_the_rest_is_dropped(manager, engine):
    seq = engine.prefill(run(0, 10))
    assert speculate(engine, seq, [-1, 0, 1, 2, 3], [50, 51, 52, 53, 54], [0, 1]) == []
    assert seq.tokens.tolist() == [*range(10), 50, 51]
    assert (seq.computed, seq.capacity, seq.num_blocks) == (12, 12, 3)
    assert engine.reads_its_own(seq)
    assert counts(manager) == (29, 3, 0)


@pytest.mark.parametrize("length", [9, 10, 11, 12])
@pytest.mark.parametrize("path", [[1, 3, 5], [0, 2], [0, 4], [1], []])
def test_an_accepted_branch_of_a_tree_is_moved_together(manager, engine, length, path):
    parents, token_ids = [-1, -1, 0, 1, 0, 3], [50, 60, 51, 61, 59, 62]
    seq = engine.prefill(run(0, length))
    moves = speculate(engine, seq, parents, token_ids, path)
    assert len(moves) == sum(at != to for to, at in enumerate(path))
    assert seq.tokens.tolist() == [*range(length), *(token_ids[at] for at in path)]
    assert engine.reads_its_own(seq)
    engine.compute(seq, [7, 8, 9, 10, 11])
    assert engine.reads_its_own(seq)


def test_drafts_into_a_page_that_a_fork_shares_leave_the_fork_as_it_was(manager, engine):
    seq = engine.prefill(run(0, 10))
    twin = manager.fork(seq)
    speculate(engine, seq, [-1, -1, 1, 2], [50, 60, 61, 62], [1, 2, 3])
    assert engine.reads_its_own(seq)
    assert engine.reads_its_own(twin)


def test_a_path_that_was_not_drafted_is_refused_and_changes_nothing(manager, engine):
    seq = engine.prefill(run(0, 10))
    manager.draft(seq, [-1, -1, 0])
    before = manager.snapshot()
    with pytest.raises(DraftError, match="accepted draft 2 does not follow 1"):
        manager.accept(seq, [1, 2], [60, 51])
    assert manager.snapshot() == before


def next_token(tokens):
    """Return what the model says after these tokens."""
    return int(kv_of(tokens, len(tokens) - 1)[0][0][0, 0, 0]) // 128 % 5


def test_speculative_decoding_gives_the_tokens_and_kv_of_plain_decoding(manager, engine):
    prompt = run(0, 9).tolist()
    plain = list(prompt)
    while len(plain) < 60:
        plain.append(next_token(plain))
    seq, accepted_lengths = engine.prefill(prompt), set()
    text = [*prompt, next_token(prompt)]  # the last token is sampled and not computed yet
    random = torch.Generator().manual_seed(1)
    while len(text) < 60:
        # The pending token, two guesses after it, and two after the first of these.
        guesses = [text[-1], *torch.randint(5, (4,), generator=random).tolist()]
        parents = [-1, 0, 0, 1, 1]
        path = [0]
        for at in range(1, 5):
            so_far = [*text[:-1], *(guesses[each] for each in path)]
            if parents[at] == path[-1] and guesses[at] == next_token(so_far):
                path.append(at)
        speculate(engine, seq, parents, guesses, path)
        assert engine.reads_its_own(seq)
        accepted_lengths.add(len(path))
        text = [*seq.tokens.tolist(), next_token(seq.tokens)]
    assert text[:60] == plain
    assert accepted_lengths == {1, 2, 3}
