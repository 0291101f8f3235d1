"""Log-probabilities of prompt tokens: those of the plain model, whatever is cached, and however a prompt is computed."""

import numpy as np
import pytest
import torch
from loop_help import GREEDY, check_scores, nothing_held, plain_answer, tiny_model
from passages_help import GATES, made
from passages_help import prompt as in_segments

from quire.engines.loop import Engine, SamplingParams, sampling, settings
from quire.engines.loop.sampling import logprobs_of
from quire.errors import ConfigError, QuireError, TokensError
from quire_passages import NoRows, Passages
from turns import few

PROMPT = tuple((7 * i * i + 3 * i + 5) % 90 + 3 for i in range(50))
OTHER = (*PROMPT[:33], 5, 6, 7, 8, 9)
SCORED = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
ALONE = SamplingParams(max_tokens=0, prompt_logprobs=0)
CUT = {"max_running": 4, "max_step_tokens": 9}
TIGHT = {"num_blocks": 16, "max_running": 3, "max_step_tokens": 12}


@pytest.fixture
def model():
    return tiny_model("llama")


def engine_of(model, **options):
    return Engine(model, **{"num_blocks": 60, "block_size": 4, "debug_nan": True} | options)


@pytest.mark.cases(3)
@pytest.mark.parametrize("options", [{}, CUT, TIGHT], ids=["whole", "cut", "tight"])
@pytest.mark.parametrize("family", few(("llama", "gpt2", "gemma3_text", "mistral+window"), "llama"))
def test_scores_are_the_plain_models_on_hits_as_on_misses(family, options):
    model = tiny_model(family)
    engine = engine_of(model, **options)
    for prompt in (PROMPT, PROMPT, OTHER):
        for params in (SCORED, ALONE):
            outputs = engine.generate([prompt, prompt, OTHER], [params, GREEDY, params])
            for output in (outputs[0], outputs[2]):
                asked, top = output.prompt_token_ids, params.prompt_logprobs
                check_scores(model, asked, output.prompt_logprobs, top)
                assert output.num_cached_tokens == 0
                tokens = plain_answer(model, asked, params.max_tokens)
                assert tuple(output.outputs[0].token_ids) == tokens
            assert outputs[1].prompt_logprobs is None
    nothing_held(engine)


def test_scores_stay_when_a_request_is_preempted(model):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=1)
    engine = engine_of(model, num_blocks=30, max_running=3, max_step_tokens=12)
    prompts = [PROMPT, OTHER, PROMPT[::-1]]
    outputs = engine.generate(prompts, params)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        check_scores(model, prompt, output.prompt_logprobs, 1)
    nothing_held(engine)


def test_a_preempted_request_scores_what_others_computed_meanwhile(model):
    engine = engine_of(model, num_blocks=16, max_running=2, max_step_tokens=8)
    first = engine.add_request(PROMPT, ALONE, priority=-1)
    for _ in range(3):
        engine.step()
    engine.add_request(PROMPT, SCORED, priority=1)
    told = {}
    while engine.has_unfinished():
        told |= {output.request_id: output for output in engine.step()}
    assert told[first].metrics.num_preemptions == 1
    check_scores(model, PROMPT, told[first].prompt_logprobs, 0)
    nothing_held(engine)


def test_answers_share_the_scores_of_their_prompt(model):
    engine = engine_of(model, **CUT)
    params = SamplingParams(n=3, best_of=4, seed=2, max_tokens=5, prompt_logprobs=1, logprobs=1)
    plain = SamplingParams(n=3, best_of=4, seed=2, max_tokens=5, logprobs=1)
    scored, unscored = (engine.generate(PROMPT, each)[0] for each in (params, plain))
    check_scores(model, PROMPT, scored.prompt_logprobs, 1)
    both = ([each.token_ids for each in output.outputs] for output in (scored, unscored))
    assert next(both) == next(both)


def test_scored_prompts_are_stored_for_others(model):
    engine = engine_of(model)
    engine.generate(PROMPT, ALONE)
    (output,) = engine.generate(PROMPT, GREEDY)
    assert output.num_cached_tokens == 48
    assert tuple(output.outputs[0].token_ids) == plain_answer(model, PROMPT, 8)


def test_a_prompt_scored_alone_has_no_answer_and_may_be_as_long_as_the_model_allows(model):
    engine = engine_of(model, max_model_len=len(PROMPT))
    (output,) = engine.generate(PROMPT, ALONE)
    (answer,) = output.outputs
    assert (answer.token_ids, answer.text, answer.finish_reason) == ([], "", "length")
    assert output.finished
    check_scores(model, PROMPT, output.prompt_logprobs, 0)
    (output,) = engine.generate([PROMPT[:1]], ALONE)
    assert output.prompt_logprobs == [None]
    with pytest.raises(TokensError, match="51 tokens"):
        engine.generate([(*PROMPT, 5)], ALONE)
    with pytest.raises(TokensError, match="50 tokens"):
        engine.generate(PROMPT, SCORED)


def test_scores_that_cannot_be_are_refused(model):
    with pytest.raises(ConfigError, match=r"max_tokens is 0.*prompt_logprobs"):
        SamplingParams(max_tokens=0)
    with pytest.raises(ConfigError, match="prompt_logprobs is 98; this model has 97 tokens"):
        engine_of(model).generate(PROMPT, SamplingParams(prompt_logprobs=98))


def test_the_logits_of_a_step_are_bounded_however_many_prompts_are_scored(model, monkeypatch):
    assert settings.scored_tokens(262_144) == 256
    monkeypatch.setattr(settings, "MOST_SCORED", 4 * 97 * 7)
    engine, rows = engine_of(model), []
    computed = engine._forward.logits

    def seen(*args):
        rows.append(len(found := computed(*args)))
        return found

    engine._forward.logits = seen
    prompts = [PROMPT, OTHER, PROMPT[::-1]]
    for prompt, output in zip(prompts, engine.generate(prompts, SCORED), strict=True):
        check_scores(model, prompt, output.prompt_logprobs, 2)
    assert max(rows) <= 7 + len(prompts)
    assert engine.scheduler.scored_tokens == 7


def test_log_probabilities_are_the_same_piece_by_piece(monkeypatch):
    logits = torch.randn(11, 97, generator=torch.Generator().manual_seed(3))
    tokens, tops = np.arange(11, dtype=np.int32), [*range(11)]
    whole = logprobs_of(tokens, logits, tops)
    monkeypatch.setattr(sampling, "_PIECE", 4 * 97)
    assert logprobs_of(tokens, logits, tops) == whole
    logits[7] = torch.nan
    with pytest.raises(QuireError, match="NaN"):
        logprobs_of(tokens, logits, tops)


def test_tiers_are_not_asked_for_a_prompt_that_is_scored(model, tmp_path):
    engine = engine_of(model, tiers=[f"disk:{tmp_path}?capacity=16MiB"])
    engine.generate(PROMPT, GREEDY)
    engine.close()
    engine = engine_of(model, tiers=[f"disk:{tmp_path}?capacity=16MiB"])
    (output,) = engine.generate(PROMPT, ALONE)
    assert not output.metrics.loaded_tokens
    check_scores(model, PROMPT, output.prompt_logprobs, 0)
    engine.close()


def test_a_scored_prompt_does_not_wait_for_another_request_that_computes_its_prefix(model):
    engine = engine_of(model, max_running=4, max_step_tokens=20, max_prefill_tokens=9)
    for params in (GREEDY, ALONE, GREEDY):
        engine.add_request(PROMPT, params)
    engine.step()
    assert len(engine.scheduler.queues.prefilling) == 2
    assert len(engine.scheduler.queues.waiting) == 1
    engine.close()


def test_a_scored_prompt_in_segments_is_computed_without_passages():
    model, segments = made("Llama", {}), in_segments(sizes=(21, 48, 40, 9))
    passages = Passages("64MiB", NoRows(), None, worth=10.0, min_tokens=2, gates=GATES)
    engine = Engine(model, num_blocks=200, passages=passages)
    parts = [segments.head, *segments.passages, segments.question]
    for each in ([parts[0], *parts[-2:0:-1], parts[-1]], parts):
        (output,) = engine.generate([{"segments": each}], GREEDY)
    assert output.passages.exactness == "approximate"
    asked = engine.add_request({"segments": parts}, ALONE)
    assert engine._requests[asked].passages is None
    (output,) = engine.step()
    check_scores(model, segments.tokens.tolist(), output.prompt_logprobs, 0)
    engine.close()
