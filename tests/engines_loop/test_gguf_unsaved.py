"""Rows that only the context of llama.cpp has: a block that another job or a tier reads has them first."""

import pytest

pytest.importorskip("gguf")
from gguf_engine_help import tiny_gguf

from quire.engines.loop import Engine, SamplingParams

pytestmark = pytest.mark.system("llama.cpp")
PROMPT = [*range(3, 21)]


def greedy(max_tokens, **more):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


@pytest.fixture
def model():
    model = tiny_gguf(n_ctx=256)
    yield model
    model.close()


def test_a_fork_preempted_before_its_copy_leaves_its_rows_in_the_block_that_others_read(model):
    engine = Engine(model, num_blocks=20, block_size=8, max_running=2)
    engine._forward.residents.idle_steps = -1  # what ends leaves the context at once
    forked = engine.add_request(PROMPT, greedy(6, n=3))
    engine.step()  # two blocks are full; that of the last two tokens is shared
    engine.add_request([50, 51, 52], greedy(2), priority=5)  # preempts one, whose copy is planned
    told = {}
    while engine.has_unfinished():
        told |= {each.request_id: each for each in engine.step() if each.finished}
    assert told[forked].error is None
    assert engine.stats().preemptions > 0
    (right,) = engine.generate([PROMPT], greedy(6))
    assert [each.token_ids for each in told[forked].outputs] == [right.outputs[0].token_ids] * 3
    engine.close()


def test_blocks_of_another_request_go_down_with_all_their_rows(model, tmp_path):
    """A request that ends before its first step has blocks whose rows another one has computed, and not yet written."""

    def engine():
        tiers = [f"disk:{tmp_path}?capacity=64MiB"]
        return Engine(model, num_blocks=20, block_size=8, tiers=tiers)

    first = engine()
    running = first.add_request(PROMPT, greedy(12))
    first.step()
    gone = first.add_request([*PROMPT, 7, 8, 9], greedy(1))
    first.scheduler.plan()
    first.abort(gone)
    while first.has_unfinished():
        told = {each.request_id: each for each in first.step() if each.finished}
    right = told[running].outputs[0].token_ids
    first.close()
    second = engine()
    (again,) = second.generate([PROMPT], greedy(12))
    assert again.metrics.loaded_tokens == {"disk": 16}
    assert again.outputs[0].token_ids == right
    second.close()
