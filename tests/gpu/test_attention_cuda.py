"""Attention of the engine on a CUDA device: what the reference gives, on random trees of tables."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "kernels_cpu"))

from attention_help import SHAPES, SIGHTS, Step  # noqa: E402

from quire.kernels.attention import (  # noqa: E402
    AttentionPlan,
    Packed,
    Scoring,
    attend,
    attend_reference,
)
from quire.kernels.attention.step import _runs_on_device  # noqa: E402

if torch.cuda.is_available():
    from quire.kernels.attention import device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LARGER = [
    {"size": 16, "heads": 32, "kv_heads": 8, "widths": (128, 128)},
    {"size": 16, "heads": 4, "kv_heads": 4, "widths": (192, 128)},  # latent attention
    {"size": 16, "heads": 8, "kv_heads": 1, "widths": (256, 256)},
    {"size": 16, "heads": 2, "kv_heads": 1, "widths": (320, 320)},  # wider than a kernel is for
    {"size": 16, "heads": 20, "kv_heads": 1, "widths": (64, 64)},  # many queries of each row
]


def compare(step, plan, scoring, *, by_kernels=True):
    """Assert that the kernels give what the reference gives, and write the new rows where it does."""
    q, new = step.rows(len(plan.slots))
    pools = tuple(pool[0].cuda() for pool in (step.pool.k, step.pool.v))
    q, new = q.cuda(), tuple(rows.cuda() for rows in new)
    wanted_pools = [pool.clone() for pool in pools]
    assert _runs_on_device(pools, q, new) == by_kernels
    out = attend(plan, pools, q, new, scoring)
    for pool, rows in zip(wanted_pools, new, strict=True):
        pool.flatten(0, 1)[plan.slots.cuda()] = rows
    wanted = attend_reference(plan, tuple(wanted_pools), q, scoring)
    assert not torch.isnan(wanted).any()
    assert out.dtype == step.dtype
    tolerance = TOLERANCES[step.dtype]
    torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
    for pool, other in zip(pools, wanted_pools, strict=True):
        torch.testing.assert_close(pool, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@settings(max_examples=25, deadline=None)  # kernels are compiled for most of them
@given(
    seed=st.integers(0, 10_000),
    shape=st.sampled_from(SHAPES + LARGER),
    sight=st.sampled_from(SIGHTS),
    min_saved=st.sampled_from([0, 20]),
    sinks=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    longest=st.sampled_from([1, 2, 9, 40]),
    deepest=st.sampled_from([7, 7, 24]),
    gaps=st.booleans(),
)
def test_any_tree_of_tables_is_attended_as_the_reference_does(
    seed, shape, sight, dtype, *, min_saved, sinks, softcap, longest, deepest, gaps
):
    step = Step(seed, **shape, dtype=dtype)
    paths, contexts = step.tree(int(step.rng.integers(1, 9)), int(step.rng.integers(1, deepest)))
    room = 100 * step.size - max(contexts)
    longest = min(longest, room // 3)
    lengths = step.rng.integers(1, longest + 1, len(paths)).tolist()
    plan = AttentionPlan(step.size, **sight, min_saved_tokens=min_saved)
    plan.update(step.packed(paths, contexts, lengths, gaps=gaps))
    sink = step.random(step.heads).cuda() if sinks else None
    widest = max(step.widths) * dtype.itemsize
    compare(step, plan, Scoring(0.3, sink, softcap), by_kernels=widest <= 512)


@pytest.mark.parametrize("sight", [{}, {"window": 9}, {"chunk": 8}], ids=str)
def test_a_plan_goes_on_while_a_batch_decodes(sight):
    step = Step(3)
    paths, contexts = step.tree(6, 4)
    plan = AttentionPlan(step.size, **sight, min_saved_tokens=0)
    packed = step.packed(paths, contexts, [1] * len(paths))
    for _ in range(3 * step.size):
        for row, context in enumerate(packed.context):
            if packed.tables[row, context // step.size] < 0:
                packed.tables[row, context // step.size] = step.free.pop()
        before = [rows.clone() for rows in (step.pool.k, step.pool.v)]
        plan.update(packed)
        compare(step, plan, Scoring(0.3))
        _, new = step.rows(len(plan.slots))
        for pool, rows, was in zip((step.pool.k, step.pool.v), new, before, strict=True):
            pool.copy_(was)
            pool[0].flatten(0, 1)[plan.slots] = rows
        packed = Packed(packed.tables, packed.context + 1, packed.lengths)


def test_the_reference_attends_where_kernels_cannot_be_compiled(monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(device, "attend_on_device", broken)
    device.can_attend.cache_clear()
    try:
        step = Step(5)
        plan = AttentionPlan(step.size)
        plan.update(step.packed(*step.tree(6, 4), [2] * 6))
        compare(step, plan, Scoring(0.3), by_kernels=False)
    finally:
        device.can_attend.cache_clear()
    assert sum("no compiler here" in record.message for record in caplog.records) == 1


def test_long_contexts_are_divided_over_the_device():
    """Runs of thousands of keys, read by more queries than a task takes, in pieces."""
    rng = torch.Generator().manual_seed(0)
    size, kv_heads, width, shared, own = 16, 2, 64, 4096, 64
    num_requests, columns = 40, (shared + own) // size
    tables = torch.arange(columns).repeat(num_requests, 1).int()
    first_own = torch.arange(num_requests)[:, None] * (own // size) + shared // size
    tables[:, shared // size :] = first_own + torch.arange(own // size)
    pools = tuple(
        torch.randn(int(tables.max()) + 1, size, kv_heads, width, generator=rng).cuda()
        for _ in range(2)
    )
    context = torch.randint(shared, shared + own - 3, (num_requests,), generator=rng).numpy()
    lengths = torch.randint(1, 4, (num_requests,), generator=rng).numpy()
    plan = AttentionPlan(size)
    plan.update(Packed(tables.numpy(), context, lengths))
    num_rows = int(lengths.sum())
    q = torch.randn(num_rows, 8, width, generator=rng).cuda()
    new = tuple(torch.randn(num_rows, kv_heads, width, generator=rng).cuda() for _ in range(2))
    out = attend(plan, pools, q, new, Scoring(width**-0.5))
    wanted = attend_reference(plan, pools, q, Scoring(width**-0.5))
    torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-5)
