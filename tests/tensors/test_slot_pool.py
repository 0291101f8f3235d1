"""Contiguous storage: what a slot holds after copies, and what nobody computed."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="install it with: make setup")

from hypothesis import given, settings  # noqa: E402 - after the check for torch
from hypothesis import strategies as st  # noqa: E402

from quire.errors import ConfigError  # noqa: E402
from quire.slots import SlotCopy  # noqa: E402
from quire.tensors import KVLayout  # noqa: E402
from quire.tensors.slot_pool import SlotPool  # noqa: E402

SLOTS, TOKENS = 5, 8
LAYOUT = KVLayout(num_layers=2, kv_heads=3, k_width=4, v_width=2, dtype=torch.float32)


def filled(**options):
    pool = SlotPool(LAYOUT, SLOTS, TOKENS, **options)
    pool.k.copy_(torch.arange(pool.k.numel()).reshape(pool.k.shape))
    pool.v.copy_(-torch.arange(pool.v.numel()).reshape(pool.v.shape))
    return pool, pool.k.numpy().copy(), pool.v.numpy().copy()


def test_shapes_are_those_of_static_layers():
    pool = SlotPool(LAYOUT, SLOTS, TOKENS)
    assert pool.k.shape == (2, SLOTS, 3, TOKENS, 4)
    assert pool.v.shape == (2, SLOTS, 3, TOKENS, 2)
    k, v = pool.slot(3)[1]
    assert (k.shape, v.shape) == ((1, 3, TOKENS, 4), (1, 3, TOKENS, 2))
    assert pool.num_bytes == pool.k.nbytes + pool.v.nbytes


def test_a_slot_is_a_view_that_writes_go_through():
    pool = SlotPool(LAYOUT, SLOTS, TOKENS)
    k, v = pool.slot(3)[1]
    k.index_copy_(2, torch.tensor([5]), torch.ones(1, 3, 1, 4))
    v.index_copy_(2, torch.tensor([5]), torch.ones(1, 3, 1, 2))
    assert float(pool.k[1, 3, :, 5].sum()) == float(pool.k.sum()) == 12
    assert float(pool.v[1, 3, :, 5].sum()) == float(pool.v.sum()) == 6


@pytest.mark.ci
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, SLOTS - 1), max_size=SLOTS, unique=True),
    st.data(),
)
def test_copies_are_one_simultaneous_assignment(destinations, data):
    copies = []
    for dst in destinations:
        stop = data.draw(st.integers(0, TOKENS))
        src, start = data.draw(st.integers(0, SLOTS - 1)), data.draw(st.integers(0, stop))
        copies.append(SlotCopy(src, dst, stop, start))
    pool, k, v = filled()
    k_old, v_old = k.copy(), v.copy()
    for src, dst, stop, start in copies:
        k[:, dst, :, start:stop] = k_old[:, src, :, start:stop]
        v[:, dst, :, start:stop] = v_old[:, src, :, start:stop]
    pool.copy(copies)
    np.testing.assert_array_equal(pool.k.numpy(), k)
    np.testing.assert_array_equal(pool.v.numpy(), v)


def test_memory_that_nobody_computed_is_zero_or_poison():
    assert not SlotPool(LAYOUT, SLOTS, TOKENS).k.any()
    pool = SlotPool(LAYOUT, SLOTS, TOKENS, poison=float("nan"))
    assert bool(pool.k.isnan().all())
    assert bool(pool.v.isnan().all())


def test_forgotten_tokens_of_a_slot_are_poisoned():
    pool, k, v = filled(poison=1e9)
    pool.forget(2, 3)
    k[:, 2, :, 3:] = v[:, 2, :, 3:] = 1e9
    np.testing.assert_array_equal(pool.k.numpy(), k)
    np.testing.assert_array_equal(pool.v.numpy(), v)


def test_without_poison_forgetting_costs_nothing():
    pool, k, _ = filled()
    pool.forget(2, 0)
    np.testing.assert_array_equal(pool.k.numpy(), k)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: p.copy([SlotCopy(0, 5, 1)]), "slot 5 is not in this pool of 5 slots"),
        (lambda p: p.copy([SlotCopy(-1, 1, 1)]), "slot -1"),
        (lambda p: p.copy([SlotCopy(0, 1, 1), SlotCopy(2, 1, 1)]), "same destination"),
        (lambda p: p.copy([SlotCopy(0, 1, 1), SlotCopy(2, 3, 9)]), "positions 0 to 9"),
        (lambda p: p.copy([SlotCopy(0, 1, 1, 2)]), "positions 2 to 1"),
        (lambda p: p.slot(5), "slot 5"),
        (lambda p: p.forget(-1, 0), "slot -1"),
    ],
)
def test_a_wrong_slot_is_refused_and_changes_nothing(call, words):
    pool, k, v = filled()
    with pytest.raises(ConfigError, match=words):
        call(pool)
    np.testing.assert_array_equal(pool.k.numpy(), k)
    np.testing.assert_array_equal(pool.v.numpy(), v)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None])
def test_counts_that_cannot_work_are_refused(bad):
    for counts in ((bad, 8), (8, bad)):
        with pytest.raises(ConfigError, match=r"(num_slots|max_tokens) must be"):
            SlotPool(LAYOUT, *counts)


def test_a_pool_larger_than_the_device_is_refused_with_its_size():
    with pytest.raises(ConfigError, match="TiB"):
        SlotPool(LAYOUT, 2**20, 2**25)


def test_tensors_made_in_inference_mode_can_be_written_outside_of_it():
    with torch.inference_mode():
        pool = SlotPool(LAYOUT, SLOTS, TOKENS)
    pool.copy([SlotCopy(0, 1, 4)])


def test_the_representation_says_what_it_holds():
    assert repr(SlotPool(LAYOUT, SLOTS, TOKENS)) == (
        "SlotPool(5 slots of 8 tokens, 5.6 KiB on cpu, float32, 2 layers, 3 kv heads, width 4/2)"
    )
