"""Attention of the engine on a CUDA device: what the reference gives on the host."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.append(str(Path(__file__).parents[1] / "engines_loop"))

from test_attention import Step  # noqa: E402

from quire.engines.packed.attention import (  # noqa: E402
    AttentionPlan,
    Scoring,
    attend,
    attend_reference,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("sight", [{}, {"window": 7}, {"chunk": 6}], ids=str)
def test_a_device_attends_as_the_host_does(sight):
    step = Step(1)
    paths, contexts = step.tree(6, 4)
    plan = AttentionPlan(step.size, **sight)
    plan.update(step.packed(paths, contexts, [3] * len(paths)))
    q, new = step.rows(len(plan.slots))
    pools = (step.pool.k[0], step.pool.v[0])
    scoring = Scoring(0.3, step.random(step.heads), 2.0)
    there = tuple(pool.cuda() for pool in pools)
    on_device = Scoring(0.3, scoring.sinks.cuda(), 2.0)
    found = attend(plan, there, q.cuda(), tuple(rows.cuda() for rows in new), on_device)
    attend(plan, pools, q, new, scoring)
    for mine, other in zip(there, pools, strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=0, atol=0, equal_nan=True)
    wanted = attend_reference(plan, pools, q, scoring)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-3, atol=1e-3)
