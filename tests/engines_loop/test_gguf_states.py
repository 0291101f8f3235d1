"""Recurrent and hybrid GGUF models: snapshots of states at ends of prompts and at branches."""

import msgspec
import numpy as np
import pytest

pytest.importorskip("gguf")
from gguf_engine_help import TOKENS, plain_model, tiny_file, tiny_gguf
from loop_help import nothing_held

from gguf_help import write_lfm2
from quire import Scope, ops
from quire.engines.gguf import GgufModel
from quire.engines.gguf.context import Chunk
from quire.engines.loop import Engine, SamplingParams
from quire.errors import ConfigError, RequestFailed, UnsupportedModel

pytestmark = pytest.mark.system("llama.cpp")
KINDS = ["lfm2", "mamba"]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
HEAD = [*range(3, 60), *range(90, 60, -1)]  # 87 tokens: whole blocks of 8, and seven


def chunk(tokens, start=0):
    return Chunk((1,), start, np.array(tokens, np.int32), np.ones(len(tokens), np.int8))


@pytest.fixture(params=KINDS)
def model(request):
    made = tiny_gguf(request.param, n_ctx=1024)
    yield made
    made.close()


@pytest.fixture
def engine(model):
    made = Engine(model, num_blocks=90, block_size=8)
    yield made
    ops.check(made.manager)
    made.close()
    nothing_held(made)


def ask(engine, *prompts, params=PARAMS, **options):
    """Cached tokens, and the answers' tokens, of prompts that are asked one after the other."""
    outputs = [engine.generate([each], params, **options)[0] for each in prompts]
    engine._forward.residents.check()
    return (
        [each.num_cached_tokens for each in outputs],
        [each.outputs[0].token_ids for each in outputs],
    )


def alone(model, *prompts):
    """The answers of an engine that caches nothing of use for each of these prompts."""
    found = []
    for each in prompts:
        engine = Engine(model, num_blocks=90, block_size=8)
        found += ask(engine, each)[1]
        engine.close()
    return found


def test_a_restored_state_goes_on_with_the_bits_of_the_computed_one(model):
    tokens = np.random.default_rng(0).integers(3, 97, 120).tolist()
    context, fresh = model.context(), model.context()
    context.decode([chunk(tokens[:96])])
    rows, state = (
        context.save(1, 0, 96) if context.layout.num_words else None,
        context.save_recurrent(1),
    )
    right = context.decode([chunk(tokens[96:], 96)])
    for each in (context, fresh):
        each.clear()
        if rows is not None:
            each.restore(rows[:33], (1,), 0)
            each.restore(rows[33:], (1,), 33)
        each.restore_recurrent(state, 1)
        assert each.extent(1) == (95, 95)
        assert np.array_equal(each.save_recurrent(1), state)
        assert np.array_equal(each.decode([chunk(tokens[96:], 96)]), right)
    for each in (context, fresh):
        each.close()


def test_a_prompt_is_found_up_to_its_last_whole_block(model, engine):
    longer = [HEAD, [*HEAD, 5, 6, 7], [*HEAD, 5, 6, 7, *range(70, 90)]]
    cached, told = ask(engine, *longer, longer[-1])
    assert cached == [0, 80, 88, 104]
    right = alone(model, *longer)
    assert told == [*right, right[-1]]


def test_a_branch_is_found_once_a_second_prompt_has_left_there(model, engine):
    prompts = [[*HEAD[:50], *range(first, first + 30)] for first in (10, 40, 60)]
    cached, told = ask(engine, *prompts)
    assert cached == [0, 0, 48]
    assert told == alone(model, *prompts)


def test_forks_go_on_from_one_state(model, engine):
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, n=3)
    (told,) = engine.generate([HEAD], params)
    (right,) = alone(model, HEAD)
    assert [each.token_ids[:6] for each in told.outputs] == [right] * 3


def test_forks_go_on_from_the_state_of_one_that_has_ended(model, engine):
    params = SamplingParams(n=4, seed=1, max_tokens=6, ignore_eos=True)
    free = engine.generate([HEAD], params)[0].outputs
    first = free[0].token_ids[0]
    assert any(each.token_ids[0] != first for each in free)
    ends = msgspec.structs.replace(params, stop_token_ids=[first])
    cut = engine.generate([HEAD], ends)[0].outputs
    assert len(cut[0].token_ids) == 1
    for one, other in zip(cut, free, strict=True):
        assert one.token_ids == other.token_ids[: len(one.token_ids)]
        assert len(one.token_ids) == 6 or one.token_ids[-1] == first


def test_evicted_states_are_computed_again(model):
    engine = Engine(model, num_blocks=16, block_size=8)
    prompts = [[first, *HEAD] for first in range(3, 12)]
    right = alone(model, *prompts)
    for _ in range(2):
        assert ask(engine, *prompts)[1] == right
    assert engine.stats().cached_tokens < 2 * len(prompts) * 80
    engine.close()


def test_many_at_once_answer_as_alone_also_where_they_are_preempted(model):
    prompts = [[first, *HEAD[:40]] for first in range(3, 12)]
    right = alone(model, *prompts)
    engine = Engine(model, num_blocks=24, block_size=8, max_running=4)
    outputs = engine.generate(prompts, PARAMS)
    assert [each.outputs[0].token_ids for each in outputs] == right
    engine.close()
    nothing_held(engine)


def test_states_come_back_from_a_disk(model, tmp_path):
    right = alone(model, [*HEAD, 5, 6, 7, 8, 9])
    for cached in (0, 88):
        engine = Engine(
            model, num_blocks=90, block_size=8, tiers=[f"disk:{tmp_path}?capacity=64MiB"]
        )
        assert ask(engine, [*HEAD, 5, 6, 7, 8, 9]) == ([cached], right)
        engine.close()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_an_abort_leaves_the_cache_right(model, engine, steps):
    right = alone(model, HEAD)
    gone = engine.add_request(HEAD, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    for _ in range(steps):
        engine.step()
    engine.abort(gone)
    engine._forward.residents.check()
    assert ask(engine, HEAD, HEAD)[1] == right * 2


def test_a_step_that_fails_ends_its_requests_and_leaves_the_cache_right(model, engine, monkeypatch):
    right = alone(model, HEAD, HEAD[::-1])
    ask(engine, HEAD)
    engine.add_request(HEAD[::-1], PARAMS)
    engine.step()
    decode = model._library.llama_decode

    def fails_behind_it(*given):
        decode(*given)
        return -3

    monkeypatch.setattr(model._library, "llama_decode", fails_behind_it)
    with pytest.raises(RequestFailed, match="llama_decode returned -3 for"):
        engine.generate([[*HEAD, 5]], PARAMS)
    monkeypatch.undo()
    while engine.has_unfinished():
        engine.step()
    engine._forward.residents.check()
    assert ask(engine, HEAD, HEAD[::-1])[1] == right


def test_a_purge_of_a_tenant_leaves_the_states_of_others(model, engine):
    right = alone(model, HEAD)
    ask(engine, HEAD[:40], scope=Scope(tenant="a"))
    engine.add_request(HEAD, PARAMS, scope=Scope(tenant="b"))
    engine.step()
    engine.step()
    assert engine.purge("a").is_complete
    while engine.has_unfinished():
        outputs = engine.step()
    assert [each.token_ids for each in outputs[0].outputs] == right
    assert ask(engine, HEAD[:40], scope=Scope(tenant="a"))[0] == [0]


def test_guesses_are_left_out(model, engine):
    prompt = [5, 6, 7, 8] * 9
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, speculation=4)
    ((_, told),) = [ask(engine, prompt, params=params)]
    assert told[0][:6] == alone(model, prompt)[0]


def test_the_states_of_all_requests_fit_into_the_device_memory(model):
    model = GgufModel(model.path, device_memory=4096)
    with pytest.raises(
        ConfigError,
        match=r"device_memory is 4.0 KiB, and the recurrent states of 64 requests take .*max_running",
    ):
        Engine(model, num_blocks=90)
    Engine(GgufModel(model.path, device_memory="1MiB"), num_blocks=90, max_running=2).close()


def test_states_beside_sliding_windows_are_refused_by_name(tmp_path):
    file = write_lfm2(tmp_path / "windowed.gguf", plain_model("lfm2"), TOKENS, window=64)
    with pytest.raises(
        UnsupportedModel,
        match=r"windowed.gguf \(lfm2\) has recurrent states beside sliding windows",
    ):
        GgufModel(file)


def test_files_of_both_kinds_are_told_apart_from_others():
    models = [GgufModel(tiny_file(kind)) for kind in ("llama", *KINDS)]
    assert [each.keeps_states for each in models] == [False, True, True]
