import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from quire.core.blocks import BlockCopy  # noqa: E402
from quire.errors import ConfigError  # noqa: E402
from quire.tensors import (  # noqa: E402
    KVLayout,
    KVPool,
    StateLayout,
    StatePool,
    StateShape,
    apply_copies,
    apply_plan,
    gather,
    gather_into,
    scatter,
)
from quire.tensors.copy import SLICE_RUN_BLOCKS  # noqa: E402
from quire.tensors.slots import runs  # noqa: E402

LAYOUT = KVLayout(num_layers=2, kv_heads=3, k_width=4, v_width=2, dtype=torch.float32, block_size=4)


def filled(num_blocks=24, layout=LAYOUT, **options):
    """A pool in which every number differs, and a numpy copy of it."""
    pool = KVPool(layout, num_blocks, **options)
    pool.k.copy_(torch.arange(pool.k.numel()).view_as(pool.k))
    pool.v.copy_(-torch.arange(pool.v.numel()).view_as(pool.v) - 1)
    return pool, pool.k.numpy().copy(), pool.v.numpy().copy()


def tokens_of(array, layer, block_ids, num_tokens):
    """`[kv_heads, num_tokens, width]` out of a numpy pool, token by token."""
    size = array.shape[2]
    rows = [array[layer, block_ids[t // size], t % size] for t in range(num_tokens)]
    return np.stack(rows, axis=1) if rows else np.zeros((array.shape[3], 0, array.shape[4]))


def test_a_pool_has_the_shape_of_its_layout_and_says_so():
    pool = KVPool(LAYOUT, 10)
    assert tuple(pool.k.shape) == (2, 10, 4, 3, 4)
    assert tuple(pool.v.shape) == (2, 10, 4, 3, 2)
    assert pool.num_bytes == 10 * LAYOUT.bytes_per_block
    assert "10 blocks of 4 tokens" in repr(pool)
    assert "width 4/2" in repr(pool)


def test_a_pool_needs_a_block():
    with pytest.raises(ConfigError, match="num_blocks is 0"):
        KVPool(LAYOUT, 0)


def test_a_pool_that_the_device_cannot_hold_says_so():
    with pytest.raises(ConfigError, match=r"cpu has no room for a tensor of .* of a pool"):
        KVPool(LAYOUT, 1 << 44)


def test_a_pool_made_in_inference_mode_can_be_written_outside_of_it():
    with torch.inference_mode():
        pool = KVPool(LAYOUT, 2)
    scatter(pool, [1], 0, [(torch.ones(3, 4, 4), torch.ones(3, 4, 2))] * 2)
    assert bool((pool.k[:, 1] == 1).all())


def test_debug_memory_starts_as_nan_and_can_be_poisoned_again():
    pool = KVPool(LAYOUT, 4, debug_nan=True)
    assert bool(pool.k.isnan().all())
    assert bool(pool.v.isnan().all())
    pool.k.zero_()
    pool.v.zero_()
    pool.poison([2])
    assert pool.k.isnan().any(dim=(0, 2, 3, 4)).tolist() == [False, False, True, False]
    assert pool.v.isnan().any(dim=(0, 2, 3, 4)).tolist() == [False, False, True, False]


def test_memory_that_is_touched_is_zero_and_in_debug_stays_as_nan():
    pool = KVPool(LAYOUT, 4)
    pool.k.fill_(3), pool.v.fill_(3)
    pool.touch()
    assert not pool.k.any()
    assert not pool.v.any()
    pool = KVPool(LAYOUT, 4, debug_nan=True)
    pool.touch()
    assert bool(pool.k.isnan().all())


def test_poison_does_nothing_outside_of_debug():
    pool, k, _ = filled()
    pool.poison([1, 2])
    np.testing.assert_array_equal(pool.k.numpy(), k)


BLOCKS = st.lists(st.integers(0, 23), min_size=1, max_size=12, unique=True)
NEIGHBOURS = st.integers(0, 12).map(lambda first: list(range(first, first + 12)))


@given(BLOCKS | NEIGHBOURS, st.data())
def test_gather_reads_the_tokens_of_a_block_table_and_no_block_before(block_ids, data):
    start = data.draw(st.integers(0, 4 * len(block_ids)))
    stop = data.draw(st.integers(start, 4 * len(block_ids)))
    pool, k, v = filled()
    table = [-1] * (start // 4) + block_ids[start // 4 :]
    out = [(torch.empty(3, stop - start, 4), torch.empty(3, stop - start, 2)) for _ in range(2)]
    gather_into(pool, table, stop, out, start)
    for layer, (whole, part) in enumerate(zip(gather(pool, block_ids, stop), out, strict=True)):
        for all_of_it, end_of_it, held in zip(whole, part, (k, v), strict=True):
            wanted = tokens_of(held, layer, block_ids, stop)
            np.testing.assert_array_equal(all_of_it.numpy(), wanted)
            np.testing.assert_array_equal(end_of_it.numpy(), wanted[:, start:])


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("num_tokens", [1, 31, 32, 63, 64])
def test_gather_reads_long_runs_of_neighbours_as_slices(first, num_tokens):
    ids = [*range(first, first + 8), *range(15, 23)]
    assert len(runs(np.array(ids))) * SLICE_RUN_BLOCKS <= len(ids)
    pool, k, _ = filled()
    for layer, (k_out, _) in enumerate(gather(pool, ids, num_tokens)):
        np.testing.assert_array_equal(k_out.numpy(), tokens_of(k, layer, ids, num_tokens))


@settings(max_examples=100)
@given(BLOCKS | NEIGHBOURS, st.data())
def test_scatter_writes_the_given_tokens_and_needs_no_block_before(block_ids, data):
    start = data.draw(st.integers(0, 4 * len(block_ids)))
    stop = data.draw(st.integers(start, 4 * len(block_ids)))
    pool, k, v = filled()
    rng = np.random.default_rng(0)
    new = []
    for layer in range(2):
        k_new = rng.standard_normal((3, stop - start, 4), dtype=np.float32)
        v_new = rng.standard_normal((3, stop - start, 2), dtype=np.float32)
        new.append((torch.from_numpy(k_new), torch.from_numpy(v_new)))
        for t in range(start, stop):
            k[layer, block_ids[t // 4], t % 4] = k_new[:, t - start]
            v[layer, block_ids[t // 4], t % 4] = v_new[:, t - start]
    scatter(pool, [-1] * (start // 4) + block_ids[start // 4 :], start, new)
    np.testing.assert_array_equal(pool.k.numpy(), k)
    np.testing.assert_array_equal(pool.v.numpy(), v)


def test_gather_returns_scattered_kv_in_the_pools_dtype():
    layout = KVLayout(2, 3, 4, 2, torch.bfloat16, 4)
    pool = KVPool(layout, 8)
    kv = [(torch.randn(3, 10, 4), torch.randn(3, 10, 2)) for _ in range(2)]
    scatter(pool, [5, 0, 7], 0, kv)
    for (k, v), (k_out, v_out) in zip(kv, gather(pool, [5, 0, 7], 10), strict=True):
        assert torch.equal(k.bfloat16(), k_out)
        assert torch.equal(v.bfloat16(), v_out)


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 23), min_size=1, max_size=8, unique=True),
    st.data(),
)
def test_copies_are_one_simultaneous_assignment(destinations, data):
    copies = [
        BlockCopy(0, data.draw(st.integers(0, 23)), dst, data.draw(st.integers(0, 4)))
        for dst in destinations
    ]
    pool, k, v = filled()
    k_old, v_old = k.copy(), v.copy()
    for _, src, dst, num_tokens in copies:
        k[:, dst, :num_tokens] = k_old[:, src, :num_tokens]
        v[:, dst, :num_tokens] = v_old[:, src, :num_tokens]
    apply_copies(pool, copies)
    np.testing.assert_array_equal(pool.k.numpy(), k)
    np.testing.assert_array_equal(pool.v.numpy(), v)


def test_in_debug_the_uncopied_rest_and_fresh_blocks_become_nan_after_the_sources_are_read():
    pool, k, _ = filled(debug_nan=True)
    apply_copies(pool, [BlockCopy(0, 3, 5, 2)], fresh=[3, 9])  # 3 was evicted and given out again
    np.testing.assert_array_equal(pool.k[:, 5, :2].numpy(), k[:, 3, :2])
    assert bool(pool.k[:, 5, 2:].isnan().all())
    assert bool(pool.k[:, [3, 9]].isnan().all())
    assert not bool(pool.k[:, 4].isnan().any())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: gather(p, [24], 1), "block id 24 is not in this pool of 24"),
        (lambda p: gather(p, [-1], 1), "block id -1"),
        (lambda p: gather(p, [1, 2], 9), "tokens 0 to 9 are not within the 8 tokens of 2 blocks"),
        (lambda p: gather(p, [[1]], 1), "one-dimensional"),
        (
            lambda p: scatter(p, [1], 3, [(torch.zeros(3, 2, 4), torch.zeros(3, 2, 2))] * 2),
            "3 to 5",
        ),
        (lambda p: scatter(p, [1], 0, [(torch.zeros(3, 2, 4), torch.zeros(3, 2, 2))]), "1 layers"),
        (
            lambda p: apply_copies(p, [BlockCopy(0, 1, 2, 3), BlockCopy(0, 4, 2, 1)]),
            "same destination",
        ),
        (lambda p: apply_copies(p, [BlockCopy(0, 1, 2, 5)]), "5 tokens"),
        (lambda p: apply_copies(p, [BlockCopy(0, 1, 24, 1)]), "block id 24"),
    ],
)
def test_a_wrong_copy_is_refused_and_changes_nothing(call, words):
    pool, k, v = filled()
    with pytest.raises(ConfigError, match=words):
        call(pool)
    np.testing.assert_array_equal(pool.k.numpy(), k)
    np.testing.assert_array_equal(pool.v.numpy(), v)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], []),
        ([7], [(0, 1)]),
        ([3, 4, 5], [(0, 3)]),
        ([3, 5, 6, 2, 1], [(0, 1), (1, 2), (3, 1), (4, 1)]),
    ],
)
def test_runs_are_maximal_and_in_order(ids, expected):
    assert runs(np.array(ids, dtype=np.int64)) == expected


STATES = StateLayout(
    (
        (
            StateShape("conv.0", (3, 2), torch.float32),
            StateShape("recurrent.0", (4,), torch.float64),
        ),
        (StateShape("conv.0", (5,), torch.bfloat16),),
    )
)


def filled_states(num_blocks=6, **options):
    pool = StatePool(STATES, num_blocks, **options)
    for layer in pool.layers:
        for held in layer:
            held.copy_(torch.arange(num_blocks).view(-1, *[1] * (held.ndim - 1)).expand_as(held))
    return pool


def values(pool):
    """The number that fills each block, per tensor."""
    return [held.flatten(1).double()[:, 0].tolist() for layer in pool.layers for held in layer]


def test_a_state_takes_the_bytes_of_its_tensors_whatever_the_block_size():
    assert STATES.bytes_per_block == 6 * 4 + 4 * 8 + 5 * 2
    pool = StatePool(STATES, 7)
    assert pool.num_bytes == 7 * STATES.bytes_per_block
    assert "7 states" in repr(pool)
    assert "2 layers, 3 tensors" in repr(pool)


def test_a_state_layout_needs_tensors():
    with pytest.raises(ConfigError, match="at least one tensor"):
        StateLayout(((),))


def test_a_state_is_written_and_read_whole():
    pool = filled_states()
    states = [
        [torch.full((3, 2), 9.0), torch.full((4,), 8.0, dtype=torch.float64)],
        [torch.full((5,), 7.0)],
    ]
    pool.write(4, states)
    assert values(pool) == [[0, 1, 2, 3, 9, 5], [0, 1, 2, 3, 8, 5], [0, 1, 2, 3, 7, 5]]
    assert torch.equal(pool.read(4)[0][1], states[0][1])


def test_a_state_of_other_shapes_is_refused_and_nothing_is_written():
    pool = filled_states()
    with pytest.raises(ConfigError, match="do not fit"):
        pool.write(1, [[torch.zeros(3, 2), torch.zeros(5)], [torch.zeros(5)]])
    assert values(pool) == [[0, 1, 2, 3, 4, 5]] * 3


def test_states_are_copied_whole_and_at_once():
    pool = filled_states()
    apply_copies(pool, [BlockCopy(0, 1, 2, 1), BlockCopy(0, 2, 1, 1), BlockCopy(0, 2, 5, 1)])
    assert values(pool) == [[0, 2, 1, 3, 4, 2]] * 3


def test_in_debug_fresh_states_are_nan_after_the_sources_are_read():
    pool = filled_states(debug_nan=True)
    apply_copies(pool, [BlockCopy(0, 3, 4, 1)], fresh=[3, 0])
    assert [np.isnan(each).tolist() for each in values(pool)] == [
        [True, False, False, True, False, False]
    ] * 3
    assert [each[4] for each in values(pool)] == [3, 3, 3]
    assert bool(StatePool(STATES, 2, debug_nan=True).layers[1][0].isnan().all())


def test_a_plan_over_groups_copies_in_the_pool_of_each():
    kv, k, _ = filled()
    states = filled_states()
    apply_plan([kv, states], [BlockCopy(1, 0, 3, 1), BlockCopy(0, 1, 2, 4)])
    np.testing.assert_array_equal(kv.k[:, 2].numpy(), k[:, 1])
    np.testing.assert_array_equal(kv.k[:, 3].numpy(), k[:, 3])
    assert values(states) == [[0, 1, 2, 0, 4, 5]] * 3


@pytest.mark.parametrize("num_blocks", [1, 5, 6, 40])
def test_a_resized_pool_keeps_what_its_leading_blocks_hold(num_blocks):
    kv, k, v = filled(6, debug_nan=True)
    states = filled_states(6, debug_nan=True)
    held = min(num_blocks, 6)
    for pool in (kv, states):
        pool.resize(num_blocks)
        assert pool.num_blocks == num_blocks
        assert pool.num_bytes == num_blocks * pool.layout.bytes_per_block
    np.testing.assert_array_equal(kv.k[:, :held].numpy(), k[:, :held])
    np.testing.assert_array_equal(kv.v[:, :held].numpy(), v[:, :held])
    assert bool(kv.k[:, held:].isnan().all())
    assert [each[:held] for each in values(states)] == [list(range(held))] * 3
    assert all(bool(held_state[held:].isnan().all()) for held_state in states.layers[0])


def test_a_pool_cannot_be_resized_to_nothing_or_beyond_the_device():
    pool, k, _ = filled(6)
    for wrong in (0, 1 << 44):
        with pytest.raises(ConfigError):
            pool.resize(wrong)
    assert pool.num_blocks == 6
    np.testing.assert_array_equal(pool.k.numpy(), k)
