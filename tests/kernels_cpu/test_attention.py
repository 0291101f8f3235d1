"""Attention over block tables against the plain reference, on random trees of tables."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
import torch
from attention_help import SHAPES, SIGHTS, TOLERANCES, Step
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.kernels import compiling
from quire.kernels.attention import AttentionPlan, Packed, Scoring, attend
from quire.kernels.attention import step as attention_step
from quire.kernels.attention.layer import Shape
from quire.kernels.attention.work import SentWork
from quire.kernels.compiling import Cpu
from quire.kernels.tiles import TILES
from quire.kernels.vectors import HAS_PAIRS
from turns import drawn


@drawn(
    20,
    400,
    seed=st.integers(0, 10_000),
    shape=st.sampled_from(SHAPES),
    sight=st.sampled_from(SIGHTS),
    dtype=st.sampled_from(list(TOLERANCES)),
    min_saved=st.sampled_from([0, 20]),
    sinks=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    longest=st.sampled_from([1, 2, 9]),
    deepest=st.sampled_from([7, 7, 24]),
    gaps=st.booleans(),
)
def test_any_tree_of_tables_is_attended_as_the_reference_does(
    seed, shape, sight, dtype, *, min_saved, sinks, softcap, longest, deepest, gaps
):
    step = Step(seed, **shape, dtype=dtype)
    paths, contexts = step.tree(int(step.rng.integers(1, 9)), int(step.rng.integers(1, deepest)))
    lengths = step.rng.integers(1, longest + 1, len(paths)).tolist()
    plan = AttentionPlan(step.size, **sight, min_saved_tokens=min_saved)
    plan.update(step.packed(paths, contexts, lengths, gaps=gaps))
    sink = step.random(step.heads) if sinks else None
    step.compare(plan, Scoring(0.3, sink, softcap))


def test_a_shared_run_is_found_from_the_tables_alone():
    step = Step(0)
    plan = AttentionPlan(step.size, min_saved_tokens=0)
    plan.update(step.packed([[1, 2, 3], [1, 2, 4], [1, 5]], [12, 12, 8], [1, 1, 1]))
    work = plan.work(1, 2, 1)
    found = {
        (tuple(work.rows[b : b + n].tolist()), start) for _, b, n, _, _, start, *_ in work.tasks
    }
    assert found == {((0, 1, 2), 0), ((0, 1), 4), ((0,), 8), ((1,), 8), ((2,), 4)}


@pytest.mark.parametrize("more", [0, 3])
def test_a_step_is_sent_to_where_there_may_be_more_room(more):
    step = Step(2)
    plan = AttentionPlan(step.size, min_saved_tokens=0)
    plan.update(step.packed(*step.tree(6, 4), [2, 1, 1, 3, 1, 1]))
    arrays = plan.arrays(2, 2, 4)
    sent = SentWork.room(tuple((len(a) + more, *a.shape[1:]) for a in arrays), torch.device("cpu"))
    sent.flat.fill_(77)
    for _ in range(2):  # what is left of a step before does not stay
        sent.take(arrays)
    last = {"merged_starts": arrays[SentWork._fields.index("merged_starts") - 1][-1], "slots": -1}
    for name, array, there in zip(SentWork._fields[1:], arrays, sent[1:], strict=True):
        assert np.array_equal(there[: len(array)], array)
        assert (there[len(array) :] == last.get(name, 0)).all()


_TABLE = np.zeros((1, 1), np.int32)


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        ((np.zeros((2, 1), np.int32), np.zeros(1, np.int64), np.ones(1, np.int64)), "2 requests"),
        ((np.zeros((1, 1), np.int32), np.zeros(1, np.int64), np.zeros(1, np.int64)), "0 rows"),
        ((np.zeros((1, 1), np.int32), np.array([4]), np.ones(1, np.int64)), "position 4"),
        ((np.array([[0, -1]], np.int32), np.array([4]), np.ones(1, np.int64)), "no block"),
        ((_TABLE, np.array([1]), np.array([2]), np.array([1])), "1 positions for 2 rows"),
        ((_TABLE, np.array([1]), np.array([2]), np.array([2, 2])), "position 2 behind one at 2"),
        ((_TABLE, np.array([2]), np.array([1]), np.array([1])), "position 1 behind one at 1"),
        ((_TABLE, np.array([1]), np.array([1]), np.array([4])), "position 4"),
    ],
)
def test_a_step_that_cannot_be_is_refused_and_the_plan_stays(packed, said):
    plan = AttentionPlan(4)
    plan.update(Packed(np.zeros((1, 1), np.int32), np.array([0]), np.array([1])))
    with pytest.raises(ConfigError, match=said):
        plan.update(Packed(*packed))
    assert plan.slots.tolist() == [0]


@pytest.mark.parametrize("sight", [{}, {"window": 9}, {"chunk": 8}], ids=str)
def test_a_plan_goes_on_while_a_batch_decodes(sight):
    step = Step(3)
    paths, contexts = step.tree(6, 4)
    plan = AttentionPlan(step.size, **sight, min_saved_tokens=0)
    packed = step.packed(paths, contexts, [1] * len(paths))
    works = []
    for _ in range(3 * step.size):
        for row, context in enumerate(packed.context):
            if packed.tables[row, context // step.size] < 0:
                packed.tables[row, context // step.size] = step.free.pop()
        plan.update(packed)
        works.append(plan.work(2, 2, 1))
        step.compare(plan, Scoring(0.3))
        packed = Packed(packed.tables, packed.context + 1, packed.lengths)
    assert all(work is works[0] for work in works)


def test_a_plan_of_some_rows_stands_where_these_stand():
    step = Step(6)
    plan = AttentionPlan(step.size)
    plan.update(step.packed([[], []], [0, 0], [5, 3], gaps=True))
    last = np.array([3, 4, 7])
    of_last = plan.of(last)
    assert of_last.position.tolist() == plan.position[last].tolist()
    step.compare(of_last, Scoring(0.3))
    assert not plan.of(last[:0]).slots.numel()


@pytest.mark.parametrize("sight", [{}, {"window": 9}, {"chunk": 8}], ids=str)
def test_a_plan_goes_on_from_the_last_rows_of_a_step(sight):
    step = Step(3)
    plan = AttentionPlan(step.size, **sight, min_saved_tokens=0)
    packed = step.packed([[1, 2], [1, 2], [5]], [8, 8, 5], [7, 2, 1])
    plan.update(packed)
    step.compare(plan, Scoring(0.3))
    last, one_each = np.cumsum(packed.lengths) - 1, np.ones(3, np.int64)
    work = plan.of(last).work(2, 2, 1)
    for context in (packed.context + packed.lengths + at for at in range(step.size)):
        for row, column in enumerate(context // step.size):
            if packed.tables[row, column] < 0:
                with pytest.raises(ConfigError, match="no block"):
                    plan.update(Packed(packed.tables, context, one_each))
                packed.tables[row, column] = step.free.pop()
        plan.update(Packed(packed.tables, context, one_each))
        assert plan.work(2, 2, 1) is work
        step.compare(plan, Scoring(0.3))


def test_a_plan_begins_again_when_a_table_is_another():
    step = Step(4)
    plan = AttentionPlan(step.size)
    first = step.packed([[1], [2]], [4, 4], [1, 1])
    plan.update(first)
    kept = plan.work(2, 2, 1)
    tables = first.tables.copy()
    tables[0, 0] = 3
    step.pool.k[0, 3] = step.pool.v[0, 3] = 1.0
    step.pool.k[0, first.tables[0, 1], 0] = step.pool.v[0, first.tables[0, 1], 0] = 1.0
    step.pool.k[0, first.tables[1, 1], 0] = step.pool.v[0, first.tables[1, 1], 0] = 1.0
    plan.update(Packed(tables, first.context + 1, first.lengths))
    assert plan.work(2, 2, 1) is not kept
    step.compare(plan, Scoring(0.3))


def test_reads_of_one_run_are_divided_among_threads_and_merged():
    step = Step(5, size=16)
    blocks = [step.free.pop() for _ in range(80)]
    lengths = [1] * 9
    tables = [blocks[:62]] * 9
    plan = AttentionPlan(16)
    plan.update(step.packed(tables, [62 * 16] * 9, lengths))
    assert len({task[7] for task in plan.work(2, 1, 2).tasks.tolist()}) > 9 + 1
    plan.update(step.packed([*tables[:4], blocks], [62 * 16] * 4 + [1280], [1] * 4 + [40]))
    step.compare(plan, Scoring(0.3, step.random(4), 2.0))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("window", [None, 300, 601])
def test_keys_that_are_scored_later_count_by_the_highest_score_of_all(dtype, window):
    step = Step(7, size=16, dtype=dtype)
    blocks = [step.free.pop() for _ in range(44)]
    plan = AttentionPlan(16, window)
    plan.update(step.packed([blocks, blocks[:17]], [703, 263], [1, 2]))
    step.compare(plan, Scoring(1.0))


def test_a_long_read_stays_with_one_thread_while_others_are_busy():
    step = Step(8, size=16)
    tables = [[step.free.pop() for _ in range(n)] for n in (20, *[2] * 20)]
    plan = AttentionPlan(16)
    plan.update(step.packed(tables, [16 * len(each) for each in tables], [1] * 21))
    heads = [(task[0], *task[8:]) for task in plan.work(2, 2, 2).tasks.tolist()]
    assert sorted(heads) == [(0, 0, 1), (0, 1, 1), *((row, 0, 2) for row in range(1, 21))]
    step.compare(plan, Scoring(0.3))


def test_rows_of_one_run_see_it_from_where_their_windows_begin():
    step = Step(6, size=16)
    shared = [step.free.pop() for _ in range(20)]
    plan = AttentionPlan(16, window=100, min_saved_tokens=0)
    plan.update(step.packed([shared, shared], [320, 320], [30, 30]))
    assert plan.work(2, 2, 1).tasks[:, 2].max() == 60
    step.compare(plan, Scoring(0.3))


@pytest.mark.parametrize(
    ("group", "widths", "dtype"),
    [
        (1, (40, 34), torch.bfloat16),
        (2, (64, 2), torch.bfloat16),
        (3, (6, 64), torch.float32),
    ],
)
def test_few_queries_of_a_head_are_attended_up_to_any_border(group, widths, dtype):
    for own in (1, 15, 16, 17):
        step = Step(own, size=16, heads=2 * group, widths=widths, dtype=dtype)
        blocks = [step.free.pop() for _ in range(3)]
        plan = AttentionPlan(16, window=[None, 5][own % 2])
        plan.update(step.packed([blocks[:1], blocks], [own - 1, 32 + own - 1], [1, 1]))
        step.compare(plan, Scoring(0.3))


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("widths", [(20, 14), (64, 48)], ids=str)  # the second in tiles
def test_many_queries_are_attended_up_to_any_border(widths, dtype):
    for num_rows in (2, 3, 4, 5, 8, 9, 16, 17, 24, 25, 32, 33, 40, 41, 48, 49, 56, 57, 70):
        step = Step(num_rows, size=16, widths=widths, dtype=dtype)
        blocks = [step.free.pop() for _ in range(5)]
        plan = AttentionPlan(16)
        plan.update(step.packed([blocks[:4], blocks], [63, 65], [num_rows, 1]))
        step.compare(plan, Scoring(0.3))


PADDED = {2: [5], 3: [16], 8: [16], 9: [32], 17: [48], 25: [64], 40: [64, 16], 49: [64, 48]}
"""Queries at once of the tasks of so many rows of two heads."""


@pytest.mark.parametrize(("num_rows", "at_once"), PADDED.items())
def test_queries_are_padded_to_the_smallest_size_that_holds_them(num_rows, at_once):
    step = Step(9, size=16)
    plan = AttentionPlan(16)
    plan.update(step.packed([[]], [0], [num_rows]))
    tasks = plan.work(2, 1, 1, few=5).tasks
    assert tasks[:, 4].tolist() == at_once
    assert tasks[:, 3].tolist() == [64 * i for i in range(len(at_once))]


def test_engines_on_two_threads_attend_at_once():
    steps = [Step(seed, size=16) for seed in (1, 2)]
    plans = [AttentionPlan(16, min_saved_tokens=0) for _ in steps]
    for step, plan in zip(steps, plans, strict=True):
        paths, contexts = step.tree(6, 4)
        plan.update(step.packed(paths, contexts, [3] * len(paths)))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor() as pool:
            both = [pool.submit(rounds, *each) for each in zip(steps, plans, strict=True)]
            for each in both:
                each.result()
    finally:
        torch.set_num_threads(before)


def rounds(step, plan):
    for _ in range(20):
        step.compare(plan, Scoring(0.3))


def test_a_child_of_a_process_that_attended_attends():
    step = Step(7)
    plan = AttentionPlan(4)
    plan.update(step.packed([[1, 2]], [5], [1]))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    step.compare(plan, Scoring(0.3))
    child = os.fork()
    if not child:
        failed = 1
        with suppress(BaseException):
            step.compare(plan, Scoring(0.3))
            failed = 0
        os._exit(failed)
    torch.set_num_threads(before)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def plain_cpu(monkeypatch):
    """Compile for a CPU that has no instructions of its own, and none for bfloat16."""
    monkeypatch.setattr(compiling, "this_cpu", lambda: Cpu("", ""))
    multiply(monkeypatch, paired=False, tiled=False)
    compiling.functions.cache_clear()
    yield
    compiling.functions.cache_clear()


@pytest.fixture(params=["widened", "paired", "tiled"])
def bfloat16_cpu(request, monkeypatch):
    """Multiply bfloat16 as floats, and in pairs or as tiles where the CPU can, whatever is fastest on it."""
    paired = HAS_PAIRS and request.param != "widened"
    multiply(monkeypatch, paired=paired, tiled=TILES and request.param == "tiled")


def multiply(monkeypatch, *, paired, tiled):
    monkeypatch.setattr(Shape.__new__, "__defaults__", (False, paired, tiled))


def a_step_of_every_kind(dtype, widths=(24, 40)):
    step = Step(8, size=16, widths=widths, dtype=dtype)
    blocks = [step.free.pop() for _ in range(4)]
    plan = AttentionPlan(16, window=70, min_saved_tokens=0)
    plan.update(step.packed([blocks[:3], blocks], [48, 64], [40, 1]))
    step.compare(plan, Scoring(0.3, step.random(step.heads), 2.0))


@pytest.mark.usefixtures("plain_cpu")
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_attention_runs_on_any_cpu(dtype):
    a_step_of_every_kind(dtype)


@pytest.mark.cases(2)
@pytest.mark.usefixtures("bfloat16_cpu")
@pytest.mark.parametrize(
    ("widths", "size"), [((64, 64), 16), ((32, 40), 48), ((96, 18), 16), ((128, 128), 16)]
)
def test_bfloat16s_are_multiplied_as_tiles_in_pairs_or_as_floats(widths, size):
    a_step_of_every_kind(torch.bfloat16)
    a_step_of_every_kind(torch.bfloat16, widths)
    step = Step(9, size=size, widths=widths, dtype=torch.bfloat16)
    shared = [step.free.pop() for _ in range(288 // size)]
    context = len(shared) * size
    for window, last in ((None, 90), (100, 2), (200, 40)):
        plan = AttentionPlan(size, window, min_saved_tokens=0)
        plan.update(step.packed([shared] * 24, [context] * 24, [1] * 23 + [last]))
        step.compare(plan, Scoring(0.3))


@pytest.mark.cases(1)
@pytest.mark.usefixtures("bfloat16_cpu")
def test_a_run_may_be_divided_within_a_block():
    step = Step(3, size=16, widths=(32, 32), dtype=torch.bfloat16)
    shared = [step.free.pop() for _ in range(63)]
    plan = AttentionPlan(16, min_saved_tokens=0)
    plan.update(step.packed([shared] * 20, [1008] * 20, [1] * 20))
    assert (plan.work(2, 2, 2).tasks[:, 5] % 16).any()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        step.compare(plan, Scoring(0.3))
    finally:
        torch.set_num_threads(before)


def test_without_a_compiler_the_reference_attends(monkeypatch):
    def none(*_):
        raise AssertionError

    monkeypatch.setattr(attention_step, "_COMPILES", False)
    monkeypatch.setattr(attention_step, "_attend_compiled", none)
    a_step_of_every_kind(torch.float32)


def test_threads_of_torch_share_a_layer_and_change_nothing():
    step = Step(9, size=16)
    shared = [step.free.pop() for _ in range(40)]
    plan = AttentionPlan(16, min_saved_tokens=0)
    plan.update(step.packed([shared] * 40, [640] * 40, [1] * 40))
    q, new = step.rows(40)
    pools = (step.pool.k[0], step.pool.v[0])
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(attend(plan, pools, q, new, Scoring(0.3)))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(*found, rtol=2e-5, atol=2e-5)


def test_a_triton_that_cannot_be_imported_is_said_once_and_not_used(tmp_path, monkeypatch, caplog):
    broken = tmp_path / "triton"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise OSError('libcuda.so.1: cannot open shared object')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    attention_step._has_triton.cache_clear()
    pools = torch.zeros(1, 16, 2, 64), torch.zeros(1, 16, 2, 64)
    assert not attention_step.runs_on_device(pools, 4)
    assert not attention_step.runs_on_device(pools, 4)
    assert ["libcuda" in each.message for each in caplog.records] == [True]
    attention_step._has_triton.cache_clear()
