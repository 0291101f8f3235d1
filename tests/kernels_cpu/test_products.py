"""Products, norms and turned attention of a plain decoder's passes, against torch."""

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from attention_help import TOLERANCES, Step

from quire.kernels.attention import AttentionPlan, Scoring, attend
from quire.kernels.attention.compiled import Reading, attention_pass
from quire.kernels.compiling import Program
from quire.kernels.norms import normed
from quire.kernels.product_streamed import STREAMED
from quire.kernels.products import operands, product
from quire.kernels.tiles import TILES
from quire.kernels.vectors import HAS_PAIRS, LANES
from turns import by_turns

WIDTHS = (1, 15, 16, 40, 256)
SHAPES = (
    (1, 2, 1),
    (5, 16, 64),
    (6, 30, 63),
    (7, 34, 65),
    (12, 258, 130),
    # Weights that are streamed: the last row and one more, parts of panels, room for rows.
    (3, 96, 33),
    (4, 1536, 100),
    (48, 64, 31),
    (49, 64, 129),
    (40, 3328, 17),
    (385, 126, 96),
    (770, 300, 33),
    (70, 1030, 66),
    (97, 1060, 40),
    # What is laid out at once, and one more: of floats, of pairs.
    (9, 384, 70),
    (386, 386, 64),
    (387, 768, 64),
    (8, 770, 65),
    # Of tiles.
    (9, 1024, 64),
    (8, 1026, 65),
    # Rows that are shared out evenly, and one fewer.
    (255, 64, 33),
    (256, 64, 33),
    (300, 130, 150),
    # Few rows of whole tiles, at the borders of how many stand side by side, of chunks and of their room.
    (1, 32, 64),
    (15, 64, 130),
    (16, 96, 256),
    (17, 32, 128),
    (32, 64, 64),
    (33, 256, 65),
    (100, 64, 64),
    (64, 1088, 160),
    (65, 64, 160),
    (33, 4096, 128),
    (65, 4096, 64),
)


@pytest.fixture(params=[1, 2])
def threads(request, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def as_operands(rows):
    room = operands(*rows.shape, rows.dtype)
    room.copy_(rows)
    return room


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_the_fused_norm_equals_the_reference(dtype, width, threads):
    torch.manual_seed(width)
    hidden, weight = torch.randn(37, width).to(dtype), torch.randn(width).to(dtype)
    limit, found = TOLERANCES[dtype], operands(37, width, dtype)
    Program([normed(hidden, weight, 1e-3, found, threads)]).run()
    right = torch.nn.functional.rms_norm(hidden.float(), (width,), weight.float(), 1e-3)
    torch.testing.assert_close(found.to(dtype), right.to(dtype), rtol=limit, atol=limit)


@pytest.mark.cases(6)
@pytest.mark.parametrize("how", ["widened", "paired", "tiles"])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(
    ("shape", "bias", "threads"), by_turns(SHAPES, [False, True], [1, 2]), indirect=["threads"]
)
def test_rows_are_multiplied_and_the_results_put_down_added_or_gated(
    monkeypatch, shape, *, dtype, bias, how, threads
):
    num_rows, depth, columns = shape
    monkeypatch.setattr("quire.kernels.products.PAIRED", how == "paired" and HAS_PAIRS)
    monkeypatch.setattr("quire.kernels.tiles.TILES", how == "tiles" and TILES)
    torch.manual_seed(num_rows)
    first, second = (torch.nn.Linear(depth, n, bias, dtype=dtype) for n in (columns, columns + 3))
    up = torch.nn.Linear(depth, columns, bias, dtype=dtype)
    given, limit = torch.randn(num_rows, depth).to(dtype), TOLERANCES[dtype]
    rows = as_operands(given)
    beside = torch.full((num_rows, 2 * columns + 4), 7, dtype=dtype)  # a column more, which stays
    added = torch.randn(num_rows, columns).to(dtype)
    before, gated = added.clone(), operands(num_rows, columns, dtype)
    with torch.inference_mode():
        program = Program(
            [
                product(rows, (first, second), beside, threads),
                product(rows, (first,), added, threads, become="added"),
                product(rows, (first, up), gated, threads, become="gated"),
            ]
        )
        program.run()
        right = [first(given), second(given)]
        weighed = torch.nn.functional.silu(right[0].float()) * up(given).float()
        right = [torch.cat([*right, beside[:, -1:]], 1), before + right[0], weighed.to(dtype)]
    assert (beside[:, -1] == 7).all()
    for found, each in zip((beside, added, gated.to(dtype)), right, strict=True):
        torch.testing.assert_close(found, each, rtol=limit, atol=limit)
    kept = beside.clone()
    with torch.inference_mode():
        program.run()  # it claims its work anew
    assert torch.equal(beside, kept)


def test_nothing_is_read_behind_the_weights():
    page = mmap.PAGESIZE
    room = mmap.mmap(-1, 2 * page)
    start = torch.frombuffer(room, dtype=torch.uint8).data_ptr()
    assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page), page, 0)
    weight = torch.frombuffer(room, dtype=torch.bfloat16, count=40 * 32, offset=page - 40 * 64)
    weight = weight.view(40, 32).normal_()
    module, rows = torch.nn.Linear(32, 40, bias=False), torch.randn(3, 32).bfloat16()
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    found = torch.empty(3, 40, dtype=torch.bfloat16)
    Program([product(as_operands(rows), (module,), found, 1)]).run()
    torch.testing.assert_close(found, rows @ weight.T, rtol=3e-2, atol=3e-2)
    assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page), page, 3)


def turned(states, cos, sin):
    """Heads `[N, heads, D]` turned by their positions (https://arxiv.org/abs/2104.09864)."""
    first, second = states.chunk(2, -1)
    return states * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_attention_turns_queries_and_keys_by_their_positions(dtype):
    for width in (2, 8, 34, 64):
        step = Step(width, size=16, widths=(width, 6), dtype=dtype)
        plan = AttentionPlan(16)
        plan.update(step.packed([[1, 2], [3]], [18, 5], [3, 40]))
        q, new = step.rows(43)
        angles = torch.from_numpy(step.rng.uniform(0, 6, (43, width)))
        rotary = angles.cos().to(dtype), angles.sin().to(dtype)
        pools = step.pool.k[0], step.pool.v[0]
        right = attend(
            plan, pools, turned(q, *rotary), (turned(new[0], *rotary), new[1]), Scoring(0.3)
        )
        keys = pools[0].clone()
        found, reading = torch.empty(*q.shape[:2], 6, dtype=dtype), Reading(q.shape[1], pools[1])
        reading.take(plan)
        given = q.clone(), (new[0].clone(), new[1]), Scoring(0.3)
        Program([attention_pass(reading, pools, *given, out=found, rotary=rotary)]).run()
        limit = TOLERANCES[dtype]
        torch.testing.assert_close(found, right, rtol=limit, atol=limit)
        torch.testing.assert_close(pools[0], keys, rtol=limit, atol=limit, equal_nan=True)


@pytest.mark.parametrize("rows", [[0, 40, 47, 48, 49], [40, 45, 46], [0, 40, 46, 49]], ids=str)
@pytest.mark.parametrize("window", [None, 7])
def test_a_plan_of_some_rows_attends_as_that_of_all(window, rows):
    step = Step(3, size=4)
    plan = AttentionPlan(4, window, min_saved_tokens=0)
    plan.update(step.packed([[1, 2], [1, 2, 3], [4], [5]], [8, 9, 4, 3], [1, 40, 6, 3]))
    q, new = step.rows(50)
    pools = step.pool.k[0], step.pool.v[0]
    right = attend(plan, pools, q, new, Scoring(0.3))
    rows = np.array(rows)
    some = plan.of(rows)
    assert torch.equal(some.slots, plan.slots[rows])
    found = attend(some, pools, q[rows], (new[0][rows], new[1][rows]), Scoring(0.3))
    torch.testing.assert_close(found, right[rows], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("become", ["plain", "added", "gated"])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.skipif(TILES, reason="tiles multiply all rows")
def test_a_row_of_few_is_the_same_whatever_other_rows_are_computed_alike(dtype, become, threads):
    torch.manual_seed(3)
    modules = [torch.nn.Linear(96, 100, dtype=dtype) for _ in range(2)]
    given, before = torch.randn(STREAMED, 96).to(dtype), torch.randn(STREAMED, 100).to(dtype)

    def multiplied(*numbers):
        count = len(numbers)
        rows, found = as_operands(given[[*numbers]]), before[[*numbers]].clone()
        if become == "gated":
            found = operands(count, 100, dtype)
        asked = modules if become == "gated" else modules[:1]
        with torch.inference_mode():
            Program([product(rows, asked, found, threads, become=become)]).run()
        return found

    alone = torch.cat([multiplied(row) for row in range(STREAMED)])
    in_lanes = multiplied(*range(STREAMED))
    limit = TOLERANCES[dtype]
    torch.testing.assert_close(in_lanes, alone, rtol=limit, atol=limit)
    for count in range(2, STREAMED + 1):
        found, whole = multiplied(*range(count)), count // LANES * LANES
        assert torch.equal(found[:whole], in_lanes[:whole])
        assert torch.equal(found[whole:], alone[whole:count])


class ChainedPasses:
    """Passes each of which reads all that the one before has written, and what comes out of the last."""

    def __init__(self, threads, seed):
        torch.manual_seed(seed)
        modules = self.modules = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(12)]
        self.rows = [operands(3, 1024, torch.float32).normal_() for _ in range(13)]
        steps = zip(self.rows, modules, self.rows[1:], strict=False)
        with torch.inference_mode():
            self.program = Program(
                [product(before, (each,), after, threads) for before, each, after in steps]
            )
            self.right = torch.nn.Sequential(*modules)(self.rows[0])

    def run(self, times):
        with torch.inference_mode():
            for _ in range(times):
                for each in self.rows[1:]:
                    each.zero_()
                self.program.run()
                torch.testing.assert_close(self.rows[-1], self.right, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "threads", [1, 2, 3, 7]
)  # the last ones more than there are cores: they sleep
def test_a_pass_reads_all_that_the_threads_of_the_pass_before_have_written(threads):
    ChainedPasses(threads, 0).run(20)


def test_teams_of_several_threads_of_python_do_not_wait_for_one_another():
    chained = [ChainedPasses(2, seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(each.run, 15) for each in chained]:
            done.result(timeout=120)
