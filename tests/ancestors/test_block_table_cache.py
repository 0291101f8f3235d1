"""A paged cache with block tables, feature by feature, in quire.

allocation   a block; the blocks of n tokens; appending a token; freeing; all or nothing
tables       position to block and offset, padded and ragged, read by attention
sharing      a prefix between sequences; a prefix that is registered and looked up by name
eviction     least recently used, first in first out, least frequently used
figures      hit rate, utilisation, fragmentation, bytes for any layout and dtype
settings     what cannot work is refused by name
"""

import pytest
from ancestors_help import BLOCK, LAYOUT, Engine, counts, run, torch

from quire import CacheManager, KVLayout, KVPool
from quire.errors import ConfigError, OutOfBlocks


@pytest.fixture
def manager():
    return CacheManager(num_blocks=16, block_size=BLOCK)


# -- allocation ----------------------------------------------------------------------------


def test_a_block_is_allocated_for_the_first_token(manager):
    seq = manager.open([7])
    assert seq.num_blocks == 0
    manager.reserve(seq, 1)
    assert seq.num_blocks == 1
    assert counts(manager) == (15, 1, 0)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (64, 16)])
def test_n_tokens_get_the_blocks_that_hold_them(manager, num_tokens, num_blocks):
    seq = manager.open(run(0, num_tokens))
    manager.reserve(seq, num_tokens)
    ids = seq.block_ids().tolist()
    assert len(ids) == len(set(ids)) == num_blocks
    assert manager.num_free == 16 - num_blocks


def test_an_appended_token_takes_a_block_only_where_the_last_one_is_full(manager):
    seq = manager.open(run(0, 3))
    manager.reserve(seq, 3)
    manager.commit(seq, run(0, 3))
    held = []
    for token in range(6):
        manager.reserve(seq, 1)
        manager.commit(seq, [900 + token])
        held.append(seq.num_blocks)
    assert held == [1, 2, 2, 2, 2, 3]
    assert seq.tokens.tolist() == [0, 1, 2, 900, 901, 902, 903, 904, 905]


def test_a_batch_appends_a_token_to_every_sequence_at_once(manager):
    engine = Engine(manager)
    seqs = [engine.prefill(run(1000 * i, 3 + i)) for i in range(3)]
    batch = manager.batch(seqs)
    manager.reserve_step(batch)
    for seq in seqs:
        engine.write(seq, [7])
    manager.commit_step(batch, [7, 7, 7])
    assert [seq.computed for seq in seqs] == [4, 5, 6]
    assert [seq.num_blocks for seq in seqs] == [1, 2, 2]
    assert all(engine.reads_its_own(seq) for seq in seqs)


def test_freeing_a_sequence_frees_what_no_one_can_find_and_caches_the_rest(manager):
    engine = Engine(manager)
    engine.serve(run(0, 10))
    assert counts(manager) == (14, 0, 2)
    assert manager.evict(run(0, 4)) == 2
    assert counts(manager) == (16, 0, 0)


def test_blocks_that_do_not_fit_are_refused_all_together(manager):
    first, second = manager.open(run(0, 40)), manager.open(run(1000, 40))
    manager.reserve(first, 40)
    before = manager.snapshot()
    with pytest.raises(OutOfBlocks) as caught:
        manager.reserve(second, 40)
    error = caught.value
    assert (error.needed, error.free, error.cached, error.active) == (10, 6, 0, 10)
    assert manager.snapshot() == before


# -- tables --------------------------------------------------------------------------------


def test_a_table_says_block_and_offset_of_every_position(manager):
    engine = Engine(manager)
    engine.serve(run(5000, 4))
    seq = engine.prefill(run(0, 10))
    table = seq.block_ids()
    for position, token in enumerate(seq.tokens.tolist()):
        block, offset = table[position // BLOCK], position % BLOCK
        state = 0
        for each in range(token + 1):
            state = (33 * state + each + 1) % 65521
        assert engine.pool.k[0, block, offset, 0, 0] == 128 * state


def test_a_batch_has_its_tables_padded_and_ragged(manager):
    engine = Engine(manager)
    seqs = [engine.prefill(run(0, 9)), engine.prefill(run(1000, 4))]
    tables = manager.tables(seqs, pad=-1)
    assert tables.padded.shape == (2, 3)
    assert tables.padded[1, 1:].tolist() == [-1, -1]
    assert tables.lengths.tolist() == [9, 4]
    assert tables.last_block_len.tolist() == [1, 4]
    for i, seq in enumerate(seqs):
        ragged = tables.indices[tables.indptr[i] : tables.indptr[i + 1]]
        assert ragged.tolist() == seq.block_ids().tolist()
        assert tables.padded[i, : seq.num_blocks].tolist() == seq.block_ids().tolist()


def test_attention_through_a_scattered_table_equals_attention_over_contiguous_kv(manager):
    layout = KVLayout(1, 1, 8, 8, torch.float32, BLOCK)
    pool = KVPool(layout, 16, debug_nan=True)
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


# -- sharing -------------------------------------------------------------------------------


def test_sequences_share_the_blocks_of_a_common_prefix(manager):
    engine = Engine(manager)
    first = engine.prefill(run(0, 12))
    second = engine.prefill([*run(0, 8).tolist(), 501, 502])
    assert second.num_cached == 8
    assert second.block_ids()[:2].tolist() == first.block_ids()[:2].tolist()
    assert second.block_ids()[2] != first.block_ids()[2]
    assert counts(manager) == (12, 4, 0)
    manager.close(first)
    assert engine.reads_its_own(second)


def test_a_prefix_is_registered_under_a_name_and_looked_up_while_everything_else_goes(manager):
    engine = Engine(manager)
    texts = {"system": run(0, 8), "tools": run(1000, 4)}
    for text in texts.values():
        engine.serve(text)
    names = {name: manager.pin(text) for name, text in texts.items()}
    for start in range(2000, 9000, 1000):
        engine.serve(run(start, 40))
    assert names["tools"].tokens.tolist() == texts["tools"].tolist()
    seq = engine.prefill([*names["system"].tokens.tolist(), 77])
    assert seq.num_cached == names["system"].num_tokens == 8
    assert engine.reads_its_own(seq)
    manager.close(seq)
    names.pop("system").close()
    engine.serve(run(9000, 60))
    assert manager.probe([*texts["system"].tolist(), 77]).num_tokens == 0
    assert manager.probe([*texts["tools"].tolist(), 77]).num_tokens == 4


# -- eviction ------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "victim"), [("fifo", "a"), ("lru", "b"), ("lfu", "c")])
def test_who_goes_first_is_the_policys_choice(policy, victim):
    manager = CacheManager(num_blocks=7, block_size=BLOCK, policy=policy)
    engine = Engine(manager)
    prompts = {"a": run(1000, 9), "b": run(2000, 9), "c": run(3000, 9)}
    for name in "abbbca":  # a came first, b was last used longest ago, c was used least
        engine.serve(prompts[name])
    assert counts(manager) == (1, 0, 6)
    engine.serve(run(4000, 9))
    gone = {name for name, prompt in prompts.items() if not manager.probe(prompt).num_tokens}
    assert gone == {victim}


# -- figures -------------------------------------------------------------------------------


def test_the_hit_rate_is_the_share_of_prompt_tokens_found(manager):
    engine = Engine(manager)
    for prompt in (run(0, 10), run(0, 10), run(1000, 10)):
        engine.serve(prompt)
    stats = manager.stats
    assert (stats.num_requests, stats.prompt_tokens, stats.hit_tokens) == (3, 30, 8)
    assert stats.hit_rate == pytest.approx(8 / 30)
    assert stats.missed == {
        "last_token": 3,
        "partial_block": 1,
        "evicted": 0,
        "window": 0,
        "cold": 18,
    }


def test_utilisation_fragmentation_and_padding_follow_from_the_blocks(manager):
    engine = Engine(manager)
    first, second = engine.prefill(run(0, 16)), engine.prefill(run(1000, 13))
    usage = manager.usage()
    assert (usage.utilisation, usage.fragmentation) == (8 / 16, 0)
    assert usage.padding == pytest.approx(3 / 32)
    manager.close(first)
    assert manager.usage().utilisation == 8 / 16
    manager.clear()
    usage = manager.usage()
    assert (usage.utilisation, usage.span) == (4 / 16, 8)
    assert usage.fragmentation == 4 / 8
    assert usage.padding == pytest.approx(3 / 16)
    assert engine.reads_its_own(second)


@pytest.mark.parametrize(
    ("layout", "bytes_per_token"),
    [
        (KVLayout(32, 8, 128, 128, torch.bfloat16), 131_072),
        (KVLayout(32, 8, 128, 128, torch.float32), 262_144),
        (KVLayout(32, 8, 128, 128, torch.float8_e4m3fn), 65_536),
        (KVLayout(61, 1, 512, 64, torch.bfloat16), 70_272),
        (KVLayout(3, 2, 4, 3, torch.float16, 7), 84),
    ],
    ids=["grouped-query", "float32", "float8", "latent", "odd-block"],
)
def test_memory_in_bytes_follows_from_layout_and_dtype(layout, bytes_per_token):
    assert layout.bytes_per_token == bytes_per_token
    assert layout.bytes_per_block == layout.block_size * bytes_per_token
    pool = KVPool(layout, 3)
    assert pool.num_bytes == 3 * layout.bytes_per_block == pool.k.nbytes + pool.v.nbytes


def test_the_bytes_in_use_are_those_of_the_blocks_in_use(manager):
    engine = Engine(manager)
    engine.prefill(run(0, 10))
    engine.serve(run(1000, 8))
    pool = manager.pools[0]
    assert pool.num_active * LAYOUT.bytes_per_block == 3 * BLOCK * 3 * 2 * 7 * 4
    assert (pool.num_active + pool.num_cached) * LAYOUT.bytes_per_block == 5 * BLOCK * 3 * 2 * 7 * 4


# -- settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_blocks": 0}, "num_blocks must be from 1"),
        ({"num_blocks": 2.5}, "num_blocks must be an integer, got 2.5"),
        ({"num_blocks": 8, "block_size": 0}, "block_size must be from 1"),
        (
            {"num_blocks": 8, "policy": "random"},
            "unknown policy 'random'; there are fifo, learned, lfu, lru",
        ),
        ({"num_blocks": 8, "pin_budget": 1.5}, "a share from 0 to 1, got 1.5"),
        ({"num_blocks": 8, "groups": []}, "give num_blocks or groups, one of them"),
    ],
)
def test_settings_of_the_cache_that_cannot_work_are_refused_by_name(settings, says):
    with pytest.raises(ConfigError, match=says):
        CacheManager(**settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"kv_heads": -1}, "kv_heads is -1"),
        ({"k_width": 1.5}, "k_width is 1.5"),
        ({"dtype": torch.int32}, r"dtype is torch.int32; K and V need a floating point dtype"),
    ],
)
def test_settings_of_the_layout_that_cannot_work_are_refused_by_name(settings, says):
    good = {"num_layers": 2, "kv_heads": 2, "k_width": 4, "v_width": 4, "dtype": torch.float32}
    with pytest.raises(ConfigError, match=says):
        KVLayout(**good | settings)
