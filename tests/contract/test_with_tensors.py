"""Managers and slots with real memory: each number in it tells which prefix, layer and head it was computed for.

Fresh memory is NaN, so whoever reads what nobody computed is found out.
"""

import pytest
from core_help import run
from kv_help import BLOCK, LAYOUT, PoolEngine, kv_of, same, torch

from quire import (
    CacheManager,
    KVLayout,
    KVPool,
    LayerGroup,
    SlidingWindow,
    SlotCache,
    SlotPool,
    ops,
)


@pytest.fixture
def manager():
    return CacheManager(num_blocks=32, block_size=BLOCK)


@pytest.fixture
def engine(manager):
    return PoolEngine(manager)


# -- tables --------------------------------------------------------------------------------


def test_attention_through_a_scattered_table_equals_attention_over_contiguous_kv(manager):
    layout = KVLayout(1, 1, 8, 8, torch.float32, BLOCK)
    pool = KVPool(layout, 32, debug_nan=True)
    prompts = run(0, 11), run(1000, 11)
    seqs = one, _ = [manager.open(prompt) for prompt in prompts]
    random = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 11, 8, generator=random)
    for position in range(11):
        for seq, prompt in zip(seqs, prompts, strict=True):
            manager.reserve(seq, 1)
            manager.commit(seq, prompt[position : position + 1])
        block = one.block_ids()[-1]
        pool.k[0, block, position % BLOCK, 0] = k[position]
        pool.v[0, block, position % BLOCK, 0] = v[position]
    padded, _, lengths, *_ = manager.tables([one])
    assert (padded[0, 1:] - padded[0, :-1] > 1).all()  # no two blocks are neighbours
    blocks, length = torch.from_numpy(padded[0]).long(), int(lengths[0])
    paged_k, paged_v = (
        each[0, blocks].flatten(0, 1)[:length].transpose(0, 1) for each in (pool.k, pool.v)
    )
    query = torch.randn(1, 1, 8, generator=random)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attend(query, paged_k, paged_v), attend(query, k[None], v[None]))


def test_a_window_slides_through_memory_much_smaller_than_the_text():
    groups = [LayerGroup("full", 32), LayerGroup("sliding", 12, SlidingWindow(8, interval=16))]
    manager = CacheManager(groups=groups, block_size=BLOCK, sub_block=False)
    engine = PoolEngine(manager)
    seq = engine.prefill(run(0, 8))
    for token in range(110):
        engine.compute(seq, [token])
        assert engine.reads_its_own(seq, group=1, window=8)
    assert engine.reads_its_own(seq)
    assert seq.num_blocks == 30 > manager.pools[1].num_blocks


def test_after_a_shrink_every_sequence_reads_its_own(manager, engine):
    seqs = [engine.prefill(run(1000 * i, 14)) for i in range(6)]
    engine.serve(run(9000, 8))
    for i in (0, 2, 3):
        manager.close(seqs[i])
        ops.invalidate(manager, run(1000 * i, 4))
    seqs = [seqs[i] for i in (1, 4, 5)]
    ops.resize(manager, {"full": 14})
    copies = engine.copy()
    engine.pool.poison(range(14, 32))  # nothing may be read where it was
    assert len(copies) > 0
    assert ops.usage(manager).num_blocks == 14
    ops.resize(manager, {"full": 32})
    reader = engine.prefill([*run(9000, 8), 7])
    assert reader.num_cached == 8
    for seq in (*seqs, reader):
        assert engine.reads_its_own(seq)
        engine.compute(seq, [7, 8, 9])
        assert engine.reads_its_own(seq)


# -- sharing -------------------------------------------------------------------------------


def test_forks_go_on_in_copies_of_their_own(manager, engine):
    seq = engine.prefill(run(0, 10))
    twin = manager.fork(seq)
    engine.compute(twin, [70, 71])
    engine.compute(seq, [80, 81])
    assert manager.stats.copied_blocks == 1
    assert engine.reads_its_own(seq)
    assert engine.reads_its_own(twin)


def test_a_prompt_that_leaves_another_inside_a_block_gets_the_shared_head_by_a_copy(
    manager, engine
):
    engine.serve(run(0, 12))
    seq = engine.prefill([*run(0, 10).tolist(), 99, 98, 97])
    assert seq.num_cached == 10
    assert engine.reads_its_own(seq)
    assert engine.reads_its_own(engine.prefill(run(0, 13)))


def test_a_copy_of_a_block_that_waits_for_its_own_copy_reads_the_origin(manager, engine):
    engine.serve(run(0, 12))
    seq = manager.open([*run(0, 10).tolist(), 99])
    twin = manager.fork(seq)
    manager.reserve(twin, 1)
    assert len(engine.copy()) == 2
    for each in (seq, twin):
        engine.compute(each, [99])
        assert engine.reads_its_own(each)


def test_a_prompt_that_two_requests_compute_at_once_is_held_once(manager, engine):
    prompts = [[*run(0, 16), *run(start, 5)] for start in (1000, 2000)]
    seqs = [manager.open(prompt) for prompt in prompts]
    for seq, prompt in zip(seqs, prompts, strict=True):
        manager.reserve(seq, len(prompt))
    for seq, prompt in zip(seqs, prompts, strict=True):
        engine.compute(seq, prompt)
    assert seqs[0].block_ids()[:4].tolist() == seqs[1].block_ids()[:4].tolist()
    assert all(engine.reads_its_own(seq) for seq in seqs)


# -- speculation ---------------------------------------------------------------------------


def speculate(engine, seq, drafts, num_accepted):
    """Compute a line of drafts, commit its accepted head, and give back the rest of its room."""
    engine.manager.reserve(seq, len(drafts))
    engine.copy()
    engine.write(seq, drafts)
    engine.manager.commit(seq, drafts[:num_accepted])
    ops.truncate(engine.manager, seq, seq.computed)


@pytest.mark.parametrize("length", [9, 10, 12])
@pytest.mark.parametrize("num_accepted", range(7))
def test_a_line_of_drafts_is_read_as_far_as_it_is_accepted(engine, length, num_accepted):
    drafts = [50, 60, 51, 61, 59, 62]
    seq = engine.prefill(run(0, length))
    speculate(engine, seq, drafts, num_accepted)
    assert seq.tokens.tolist() == [*range(length), *drafts[:num_accepted]]
    engine.compute(seq, [7, 8, 9, 10, 11])
    assert engine.reads_its_own(seq)


def test_drafts_into_a_block_that_a_fork_shares_leave_the_fork_as_it_was(manager, engine):
    seq = engine.prefill(run(0, 10))
    twin = manager.fork(seq)
    speculate(engine, seq, [50, 60, 61, 62], 3)
    assert engine.reads_its_own(seq)
    assert engine.reads_its_own(twin)


def test_speculative_decoding_gives_the_tokens_and_kv_of_plain_decoding(engine):
    def next_token(tokens):
        return int(kv_of(tokens, len(tokens) - 1)[0][0][0, 0, 0]) // 128 % 5

    plain = run(0, 9).tolist()
    while len(plain) < 60:
        plain.append(next_token(plain))
    seq, accepted_lengths = engine.prefill(plain[:9]), set()
    text = plain[:10]  # the last token is sampled and not computed yet
    random = torch.Generator().manual_seed(1)
    while len(text) < 60:
        # The pending token, and two guesses after it.
        guesses = [text[-1], *torch.randint(5, (2,), generator=random).tolist()]
        num_accepted = 1
        while num_accepted < 3:
            if guesses[num_accepted] != next_token([*text[:-1], *guesses[:num_accepted]]):
                break
            num_accepted += 1
        speculate(engine, seq, guesses, num_accepted)
        assert engine.reads_its_own(seq)
        accepted_lengths.add(num_accepted)
        text = [*seq.tokens.tolist(), next_token(seq.tokens)]
    assert text[:60] == plain
    assert accepted_lengths == {1, 2, 3}


# -- slots ---------------------------------------------------------------------------------


def test_copies_between_slots_that_follow_one_another_reach_every_layer():
    cache, pool = SlotCache(3, 32), SlotPool(LAYOUT, 3, 32, poison=torch.nan)

    def compute(handle, token_ids):
        tokens, start = [*handle.tokens.tolist(), *token_ids], handle.computed
        for layer, new in zip(pool.slot(handle.slot), kv_of(tokens, start), strict=True):
            for states, written in zip(layer, new, strict=True):
                states[0, :, start : len(tokens)] = written
        cache.commit(handle, token_ids)

    first = cache.open(run(0, 10))
    compute(first, run(0, 10).tolist())
    second = cache.open([*run(0, 8).tolist(), 70])
    third = cache.fork(second)
    cache.close(first)
    copies = cache.take_copies()
    assert len(copies) == 2
    pool.copy(copies)
    for handle in (second, third):
        compute(handle, [70])
        tokens = [*range(8), 70]
        read = [(k[0, :, :9], v[0, :, :9]) for k, v in pool.slot(handle.slot)]
        assert same(read, kv_of(tokens))
