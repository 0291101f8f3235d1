"""The engine as callers see it: outputs, refusals, and life after a failure."""

import threading
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from loop_help import EOS, GREEDY, nothing_held, plain_answer, tiny_model, trained_model
from transformers import AutoTokenizer

import quire
from quire import Scope
from quire.engines.loop import Engine, SamplingParams
from quire.errors import (
    CacheBusy,
    ConfigError,
    DeadlinePassed,
    QueueTimeout,
    RequestFailed,
    TokensError,
)
from quire.foresight import Trail

PROMPT = tuple(range(10, 30))


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.fixture
def engine(model):
    engine = Engine(model, num_blocks=50, block_size=4, debug_nan=True)
    yield engine
    engine.close()
    nothing_held(engine)


@pytest.fixture(scope="module")
def talker():
    return Engine(
        trained_model(), AutoTokenizer.from_pretrained(quire.demo_model()), num_blocks=200
    )


@pytest.fixture
def broken(model, monkeypatch):
    """Makes the forwards fail in which a token stands."""
    forward = model.forward

    def break_at(token):
        def fail(input_ids=None, **arguments):
            if (input_ids == token).any():
                raise RuntimeError("no such number")
            return forward(input_ids=input_ids, **arguments)

        fail.__signature__ = None
        monkeypatch.setattr(model, "forward", fail)

    return break_at


def steps(engine):
    """All outputs until nothing is left to do."""
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    return outputs


def test_outputs_stand_in_the_order_of_the_prompts(engine, model):
    prompts = [
        PROMPT,
        PROMPT[:7],
        [5],
        {"prompt_token_ids": [9, 8, 7]},
        torch.tensor([6, 6]).numpy(),
    ]
    outputs = engine.generate(prompts, GREEDY)
    asked = [PROMPT, PROMPT[:7], (5,), (9, 8, 7), (6, 6)]
    assert [tuple(each.prompt_token_ids) for each in outputs] == asked
    for prompt, output in zip(asked, outputs, strict=True):
        assert tuple(output.outputs[0].token_ids) == plain_answer(model, prompt, 8)
        assert output.finished


def test_generate_takes_one_prompt_or_many_with_parameters_for_each(engine):
    (alone,) = engine.generate(list(PROMPT), GREEDY)
    short = SamplingParams(temperature=0, max_tokens=1)
    first, second = engine.generate([PROMPT, PROMPT], [short, GREEDY])
    assert first.outputs[0].token_ids == alone.outputs[0].token_ids[:1]
    assert second.outputs[0].token_ids == alone.outputs[0].token_ids
    assert first.outputs[0].finish_reason == "length"


def test_outputs_report_the_cached_tokens_of_their_prompt(engine):
    assert engine.generate(PROMPT, GREEDY)[0].num_cached_tokens == 0
    assert engine.generate(PROMPT, GREEDY)[0].num_cached_tokens == len(PROMPT) - 1
    assert engine.generate(PROMPT, GREEDY, scope=Scope(salt="other"))[0].num_cached_tokens == 0


def test_a_prefix_that_waiting_requests_share_is_computed_once(engine):
    prompts = [[*PROMPT, 50 + i] for i in range(5)]
    outputs = engine.generate(prompts, GREEDY)
    assert sorted(each.num_cached_tokens for each in outputs) == [0, 20, 20, 20, 20]


def test_steps_tell_what_is_new_from_its_beginning(engine, model):
    engine.add_request(PROMPT, GREEDY, request_id="a")
    outputs = steps(engine)
    told = [tuple(each.outputs[0].token_ids) for each in outputs]
    answer = plain_answer(model, PROMPT, 8)
    assert told == [answer[: n + 1] for n in range(len(answer))]
    assert [each.finished for each in outputs] == [False] * (len(answer) - 1) + [True]


def test_a_stop_token_ends_an_answer_after_min_tokens(engine, model):
    answer = plain_answer(model, PROMPT, 8)
    stop = answer[1]
    assert stop != answer[0]
    (output,) = engine.generate(PROMPT, SamplingParams(temperature=0, stop_token_ids=[stop]))
    assert tuple(output.outputs[0].token_ids) == answer[:2]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    later = SamplingParams(temperature=0, stop_token_ids=[stop], min_tokens=4, max_tokens=8)
    assert stop not in engine.generate(PROMPT, later)[0].outputs[0].token_ids[:4]


@pytest.mark.ci
def test_the_models_end_is_no_stop_reason_and_can_be_ignored(engine, model):
    prompt = next(
        p for p in ((i, i + 1, i + 2) for i in range(3, 90)) if EOS in plain_answer(model, p, 30)
    )
    params = SamplingParams(temperature=0, max_tokens=30)
    (ended,) = engine.generate(prompt, params)
    assert ended.outputs[0].token_ids[-1] == EOS
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", None)
    on = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    assert len(engine.generate(prompt, on)[0].outputs[0].token_ids) == 30


def test_answers_of_one_request_differ_and_a_seed_repeats_them_whatever_runs_beside(engine):
    params = SamplingParams(n=3, seed=7, max_tokens=12, ignore_eos=True)
    (alone,) = engine.generate(PROMPT, params)
    tokens = [each.token_ids for each in alone.outputs]
    assert len({tuple(each) for each in tokens}) == 3
    assert [each.index for each in alone.outputs] == [0, 1, 2]
    beside = [SamplingParams(max_tokens=5), params, SamplingParams(n=2, max_tokens=9)]
    again = engine.generate([PROMPT[:5], PROMPT, PROMPT[3:]], beside)[1]
    assert [each.token_ids for each in again.outputs] == tokens


def test_logprobs_are_told_for_each_token(engine):
    params = SamplingParams(n=2, temperature=0, max_tokens=5, logprobs=2, speculation=2)
    (output,) = engine.generate(PROMPT, params)
    for answer in output.outputs:
        assert len(answer.logprobs) == len(answer.token_ids)
        for token, told in zip(answer.token_ids, answer.logprobs, strict=True):
            assert token == next(iter(told))
            assert told[token].rank == 1


def test_text_is_that_of_the_tokens_and_ends_before_a_stop_string(talker):
    params = SamplingParams(temperature=0, max_tokens=40)
    (output,) = talker.generate("Once upon a time", params)
    text = output.outputs[0].text
    assert output.prompt == "Once upon a time"
    assert talker.tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True) == text
    stop = text[9:13]
    before = talker.stats().steps
    (output,) = talker.generate(
        "Once upon a time", SamplingParams(temperature=0, max_tokens=40, stop=stop)
    )
    assert talker.stats().steps - before < 20  # it ends there, and not when it is looked at last
    assert output.outputs[0].text == text[: text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    nothing_held(talker)


def test_stream_yields_text_piece_by_piece(talker):
    talker.add_request("Once upon a time", SamplingParams(temperature=0, max_tokens=20))
    texts = [each.outputs[0].text for each in steps(talker)]
    assert all(two.startswith(one) for one, two in pairwise(texts))
    assert len(texts) == 20


def test_an_aborted_request_gives_its_blocks_back_at_once(engine):
    ids = [engine.add_request([*PROMPT, i], GREEDY) for i in (1, 2)]
    engine.step()
    assert engine.manager.num_active
    for request_id in ids:
        engine.abort(request_id)
        engine.abort(request_id)
    assert engine.step() == []
    nothing_held(engine)


def test_a_failure_of_the_model_ends_the_requests_of_that_step_alone(engine, broken, model):
    (before,) = engine.generate(PROMPT, GREEDY)
    broken(77)
    bad = engine.add_request([*PROMPT, 77], SamplingParams(n=2, max_tokens=3))
    outputs = {each.request_id: each for each in steps(engine)}
    assert isinstance(outputs[bad].error, RequestFailed)
    assert "RuntimeError: no such number" in str(outputs[bad].error)
    assert [each.finish_reason for each in outputs[bad].outputs] == ["error", "error"]
    nothing_held(engine)
    assert engine.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == before.outputs[0].token_ids
    assert engine.stats().failed_requests == 1


def test_generate_raises_the_failure_of_a_request_and_aborts_the_others(engine, broken):
    broken(77)
    with pytest.raises(RequestFailed, match="no such number"):
        engine.generate([[*PROMPT, 77], PROMPT], GREEDY)
    nothing_held(engine)


def test_an_output_says_when_its_request_came_and_had_its_tokens(model):
    now = [-1.0]
    engine = Engine(model, num_blocks=50, block_size=4, max_running=1, clock=lambda: now[0])
    three = SamplingParams(max_tokens=3, ignore_eos=True)
    ids = [engine.add_request([1, 2, each], three) for each in (3, 4)]
    told = {each: [] for each in ids}
    while engine.has_unfinished():
        now[0] += 1
        for output in engine.step():
            told[output.request_id].append(output.metrics)
    first, second = ([(t.first_token_ts, t.last_token_ts) for t in told[each]] for each in ids)
    assert first == [(0, None), (0, None), (0, 2)]  # each output as it was then
    assert second == [(3, None), (3, None), (3, 5)]
    assert [told[each][-1].first_token_latency for each in ids] == [1, 4]


def test_a_request_past_its_deadline_is_given_up(model):
    now = [0.0]
    engine = Engine(model, num_blocks=50, block_size=4, clock=lambda: now[0])
    late = engine.add_request(PROMPT, GREEDY, deadline_s=5)
    drawn = SamplingParams(n=3, max_tokens=8, ignore_eos=True)  # none ends by chance
    three = engine.add_request(PROMPT, drawn, deadline_s=5)
    other = engine.add_request(PROMPT[:9], GREEDY)
    for _ in range(3):  # behind the first one's prompt, its answers are three jobs then
        engine.step()
    now[0] = 6.0
    outputs = {each.request_id: each for each in steps(engine)}
    assert isinstance(outputs[late].error, DeadlinePassed)
    assert isinstance(outputs[three].error, DeadlinePassed)
    assert [each.finish_reason for each in outputs[three].outputs] == ["error"] * 3
    assert outputs[other].error is None
    nothing_held(engine)


def test_a_request_says_when_its_turn_came(model):
    now = [0.0]
    engine = Engine(model, num_blocks=50, block_size=4, max_running=1, clock=lambda: now[0])
    first, second = (engine.add_request(each, GREEDY) for each in (PROMPT[:9], PROMPT))
    times = {}
    while engine.has_unfinished():
        now[0] += 1.0
        times |= {each.request_id: each.metrics for each in engine.step()}
    assert (times[first].arrival_time, times[first].scheduled_ts) == (0.0, 1.0)
    assert times[first].last_token_ts <= times[second].scheduled_ts <= times[second].first_token_ts


def test_a_request_says_why_its_hit_ended_and_how_often_it_was_preempted(model):
    engine = Engine(model, num_blocks=20, block_size=4, watchers=[Trail()])
    reasons = []
    for prompt in (PROMPT, PROMPT, range(35, 95), PROMPT):
        (output,) = engine.generate([tuple(prompt)], GREEDY)
        reasons.append((output.metrics.missed.reason, output.metrics.num_preemptions))
    assert [reasons[0], reasons[-1]] == [("cold", 0), ("evicted", 0)]
    assert output.num_cached_tokens + output.metrics.missed.num_tokens < len(PROMPT)
    params = SamplingParams(temperature=0, max_tokens=26, ignore_eos=True)
    prompts = [tuple(range(start, start + 30)) for start in (3, 50)]
    small = Engine(model, num_blocks=18, block_size=4)
    told = [each.metrics.num_preemptions for each in small.generate(prompts, params)]
    assert sum(told) == small.stats().preemptions > 0


def test_a_request_that_waited_for_its_longest_ends_and_those_that_run_go_on(model):
    now = [0.0]
    engine = Engine(model, num_blocks=50, block_size=4, max_running=1, clock=lambda: now[0])
    first = engine.add_request(PROMPT, GREEDY, max_wait_s=5)
    second = engine.add_request(PROMPT[::-1], GREEDY, max_wait_s=5)
    engine.step()
    now[0] = 6.0
    outputs = {each.request_id: each for each in steps(engine)}
    assert outputs[first].error is None
    assert isinstance(outputs[second].error, QueueTimeout)
    nothing_held(engine)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("prompt", "options", "error", "words"),
    [
        ([], {}, TokensError, "empty"),
        ([-1], {}, TokensError, "-1"),
        ([5] * 200, {}, TokensError, "200 tokens.*max_model_len"),
        ([97], {}, TokensError, "97.*below 97"),
        ("words", {}, ConfigError, "tokenizer"),
        ({"text": 1}, {}, ConfigError, "prompt_token_ids"),
        ([5], {"priority": "high"}, ConfigError, "priority"),
        ([5], {"hint": 3}, ConfigError, "hint"),
        ([5], {"speed": 3}, ConfigError, "speed"),
        ([5], {"deadline_s": "soon"}, ConfigError, "deadline_s is .* got 'soon'"),
        ([5], {"deadline_s": float("nan")}, ConfigError, "deadline_s is .* got nan"),
        ([5], {"deadline_s": -1}, ConfigError, "deadline_s is .* above 0, got -1"),
        ([5], {"deadline_s": 0}, ConfigError, "deadline_s is .* above 0, got 0"),
        ([5], {"deadline_s": True}, ConfigError, "deadline_s is .* got True"),
        ([5], {"max_wait_s": "long"}, ConfigError, "max_wait_s is .* got 'long'"),
        ([5], {"max_wait_s": 0}, ConfigError, "max_wait_s is .* above 0, got 0"),
        (None, {}, TokensError, "a prompt is a text.* got None"),
        (5, {}, TokensError, "a prompt is a text.* got 5"),
    ],
)
def test_a_bad_request_is_refused_and_leaves_nothing(engine, prompt, options, error, words):
    with pytest.raises(error, match=words):
        engine.add_request(prompt, GREEDY, **options)
    nothing_held(engine)


def test_params_of_another_kind_are_refused(engine):
    for call in (engine.add_request, engine.generate):
        with pytest.raises(ConfigError, match=r"params is SamplingParams\(...\), got {'n': 2}"):
            call(list(PROMPT), {"n": 2})
    nothing_held(engine)


def test_a_thousand_answers_are_aborted_as_one(engine):
    request_id = engine.add_request(PROMPT, SamplingParams(n=1000, temperature=0, max_tokens=3))
    for _ in range(3):
        engine.step()
    engine.abort(request_id)
    nothing_held(engine)


@pytest.mark.cases(1)
@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_the_model_computes_for_another_thread_while_an_engine_does(own):
    model = tiny_model("gemma3_text")
    model.set_attn_implementation(own)
    prompt = PROMPT * 3  # beyond the window
    alone = plain_answer(model, prompt, 8)
    engine = Engine(model, num_blocks=50, block_size=4)
    meanwhile = []

    def generate(*_):
        ids = torch.tensor([prompt])
        meanwhile.append(tuple(model.generate(ids, max_new_tokens=8)[0, len(prompt) :].tolist()))

    thread = threading.Thread(target=generate)

    def in_a_thread(*_):
        if thread.ident is None:
            thread.start()
            thread.join()

    hook = model.model.layers[0].register_forward_hook(in_a_thread)
    (output,) = engine.generate(prompt, GREEDY)
    hook.remove()
    assert meanwhile == [alone] == [tuple(output.outputs[0].token_ids)]
    assert model.config._attn_implementation == own


def test_an_id_stands_for_one_request_at_a_time(engine):
    engine.add_request(PROMPT, GREEDY, request_id="a")
    with pytest.raises(ConfigError, match="'a' runs already"):
        engine.add_request(PROMPT, GREEDY, request_id="a")
    steps(engine)
    engine.add_request(PROMPT, GREEDY, request_id="a")


def test_an_answer_ends_where_the_model_or_the_memory_does(model):
    engine = Engine(model, num_blocks=10, block_size=4)
    assert engine.max_model_len == 40
    (output,) = engine.generate(PROMPT, SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 20
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(ConfigError, match=r"max_model_len is 41.*40 tokens"):
        Engine(model, num_blocks=10, block_size=4, max_model_len=41)


def test_a_model_that_changes_is_another_one_to_its_engine():
    model = deepcopy(tiny_model("llama"))
    engine = Engine(model, num_blocks=50, block_size=4)
    first = engine.generate(PROMPT, GREEDY)[0]
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
    changed = engine.generate(PROMPT, GREEDY)[0]
    assert changed.num_cached_tokens == 0
    assert tuple(changed.outputs[0].token_ids) == plain_answer(model, PROMPT, 8)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
    again = engine.generate(PROMPT, GREEDY)[0]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_change_of_the_model_ends_running_requests_and_later_ones_are_served():
    model = deepcopy(tiny_model("llama"))
    engine = Engine(model, num_blocks=50, block_size=4)
    before = engine.add_request(PROMPT, GREEDY)
    engine.step()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(1)
    later = engine.add_request(PROMPT[5:12], GREEDY)
    outputs = {each.request_id: each for each in steps(engine)}
    output = outputs[before]
    assert tuple(outputs[later].outputs[0].token_ids) == plain_answer(model, PROMPT[5:12], 8)
    assert "the model was changed since the request came" in str(output.error)
    nothing_held(engine)
    after = engine.generate(PROMPT, GREEDY)[0]
    assert after.num_cached_tokens == 0
    assert tuple(after.outputs[0].token_ids) == plain_answer(model, PROMPT, 8)
    model.to(torch.bfloat16)
    with pytest.raises(ConfigError, match="make a new cache"):
        engine.add_request(PROMPT, GREEDY)


def test_a_second_thread_is_refused_and_changes_nothing(model):
    engine = Engine(model, num_blocks=50, block_size=4)
    refusals = []

    def meddle():
        for call in (engine.step, engine.close, lambda: engine.generate(PROMPT, GREEDY)):
            try:
                call()
            except CacheBusy as error:
                refusals.append(str(error))

    thread = threading.Thread(target=meddle)

    def hook(*_):
        if thread.ident is None:
            thread.start()
            thread.join()

    handle = model.model.layers[0].register_forward_hook(hook)
    (output,) = engine.generate(PROMPT, GREEDY)
    handle.remove()
    assert tuple(output.outputs[0].token_ids) == plain_answer(model, PROMPT, 8)
    assert len(refusals) == 3
    assert "'MainThread' is using this engine" in refusals[0]
    nothing_held(engine)


def test_an_engine_that_is_closed_takes_nothing_more(model):
    engine = Engine(model, num_blocks=50, block_size=4)
    engine.close()
    with pytest.raises(ConfigError, match="the engine was closed"):
        engine.generate(PROMPT, GREEDY)
    engine.close()


def test_texts_that_end_an_answer_need_a_tokenizer(model):
    engine = Engine(model, num_blocks=50, block_size=4)
    with pytest.raises(ConfigError, match="stop needs the text"):
        engine.generate(PROMPT, SamplingParams(stop=["x"]))
    nothing_held(engine)


@pytest.mark.parametrize(
    "prompts",
    [None, 5, b"ab", [1.5], [None], {1, 2}, [[None]], {"prompt": 5}, "a\ud800b", ["a\ud800b"]],
)
def test_a_prompt_that_is_none_is_refused_in_quires_words(talker, prompts):
    with pytest.raises((ConfigError, TokensError)):
        talker.generate(prompts, GREEDY)
    nothing_held(talker)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "make", [torch.tensor, iter, lambda ids: torch.tensor([ids]), lambda ids: [torch.tensor(ids)]]
)
def test_token_ids_may_be_a_tensor_or_come_one_by_one(engine, make):
    (output,) = engine.generate(make([7, 8, 9]), GREEDY)
    assert output.prompt_token_ids == [7, 8, 9]


def test_settings_that_contradict_each_other_or_cannot_be_are_refused(model):
    with pytest.raises(ConfigError, match="kv_memory, '1MiB', and num_blocks, 50"):
        Engine(model, num_blocks=50, kv_memory="1MiB")
    with pytest.raises(ConfigError, match="clock is a function"):
        Engine(model, num_blocks=50, clock=None)


def test_an_option_that_is_none_is_refused_with_all_that_are(engine):
    with pytest.raises(ConfigError, match=r"'salt' is no option.* scope, priority, deadline_s"):
        engine.generate(PROMPT, GREEDY, salt="a")
