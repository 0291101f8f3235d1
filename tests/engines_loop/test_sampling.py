"""Sampling: each rule, the stated order, and a request's own random numbers alone."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from sampling_help import EOS, VOCAB, Letters, Toy, choose, log_softmax, uniform
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quire.engines.loop.params import SamplingParams
from quire.engines.loop.sampling import AnswerRules, Sampler, kept, propose
from quire.errors import ConfigError, QuireError
from turns import drawn

TOKEN = st.integers(0, VOCAB - 1)
WISHES = st.builds(
    SamplingParams,
    max_tokens=st.none(),
    temperature=st.sampled_from([0.0, 0.31, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 5, 99]),
    top_p=st.sampled_from([1.0, 1.0, 0.137, 0.7, 0.9531]),
    min_p=st.sampled_from([0.0, 0.0, 0.0513, 0.317]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.37, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.71, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.33, -0.25]),
    logit_bias=st.none()
    | st.dictionaries(TOKEN, st.sampled_from([-100.0, -1.5, 2.25]), max_size=3),
    min_tokens=st.sampled_from([0, 0, 3]),
    allowed_token_ids=st.none() | st.sets(TOKEN, min_size=6).map(sorted),
    bad_words=st.none() | st.lists(st.text("abcdefghijkl", min_size=1, max_size=3), max_size=40),
    stop_token_ids=st.none() | st.lists(TOKEN, max_size=3),
    ignore_eos=st.booleans(),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.sampled_from([None, None, 0, 3]),
)
PROMPT = st.lists(TOKEN, min_size=2, max_size=6)


def rows(*each):
    return torch.from_numpy(np.stack(each))


def only(x, min_p=0.0, top_k=0, top_p=1.0):
    return kept(
        x, *(torch.full((len(x), 1), value, dtype=x.dtype) for value in (min_p, top_k, top_p))
    )


def answer(model, params, prompt, num_tokens, drafter=None):
    """Return the tokens of one request that runs alone, and how many steps they took."""
    sampler = Sampler(VOCAB, tokenizer=Letters(), eos_ids=EOS)
    (rules,) = sampler.rules(params, prompt)
    text, steps = list(prompt), 0
    while len(text) < len(prompt) + num_tokens:
        drafts = np.asarray(drafter(text) if drafter else [], np.int32)
        logits = rows(*(model([*text, *drafts[:j]]) for j in range(len(drafts) + 1)))
        text += sampler.sample([rules], logits, [drafts]).tokens[0].tolist()
        steps += 1
    return text[len(prompt) : len(prompt) + num_tokens], steps


@pytest.mark.ci
@drawn(
    50,
    1000,
    st.lists(st.tuples(WISHES, PROMPT), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_batched_sampling_chooses_the_tokens_of_one_request_at_a_time(requests, random):
    model, sampler = Toy(), Sampler(VOCAB, tokenizer=Letters(), eos_ids=EOS)
    rules = [sampler.rules(*each)[0] for each in requests]
    answers = [[] for _ in requests]
    for _ in range(6):
        keys = random.sample(range(len(requests)), random.randint(1, len(requests)))
        logits = [model(requests[key][1] + answers[key]) for key in keys]
        sampled = sampler.sample([rules[key] for key in keys], rows(*logits))
        for at, key in enumerate(keys):
            params, prompt = requests[key]
            token = int(sampled.tokens[at])
            assert token == choose(logits[at], params, prompt, answers[key])
            told = sampled.logprobs and sampled.logprobs[at]
            if params.logprobs is None:
                assert not told
            else:
                (told,) = told
                own = log_softmax(logits[at])
                best = sorted(range(VOCAB), key=lambda other: -own[other])[: params.logprobs]
                assert list(told) == list(dict.fromkeys([token, *best]))
                for other, (logprob, rank) in told.items():
                    assert logprob == pytest.approx(own[other], abs=1e-5)
                    assert rank == (own >= own[other]).sum()
            answers[key].append(token)


@drawn(20, 400, WISHES, PROMPT, st.integers(0, 3))
def test_drafts_change_no_token(params, prompt, kind):
    model = Toy()
    plain, _ = answer(model, params, prompt, 24)
    drafters = [
        lambda text: propose(np.asarray(text, np.int32), 4),
        lambda text: plain[len(text) - len(prompt) :][:5],  # always right
        lambda text: [(text[-1] + 1) % VOCAB, text[-1]],
        lambda text: [*plain[len(text) - len(prompt) :][:2], 7, 7],  # right, then wrong
    ]
    drafted, steps = answer(model, params, prompt, 24, drafters[kind])
    assert drafted == plain
    if kind == 1:
        assert steps == 24 / 6


def test_an_answer_is_the_same_whatever_stands_beside_it_and_in_whatever_order():
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(3)) * 3
    wishes = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_p=0.9, seed=2),
        SamplingParams(temperature=1.4, top_p=0.99999, top_k=40, seed=3),
        SamplingParams(temperature=1.2, min_p=0.02, frequency_penalty=0.5, logprobs=2, seed=4),
        SamplingParams(temperature=9.0, top_p=0.999, seed=5),  # needs more than the likeliest 1,024
    ]
    alone = {}
    for key, params in enumerate(wishes):
        sampler = Sampler(5000)
        own = sampler.rules(params, [1, 2])
        alone[key] = [sampler.sample(own, logits[at : at + 1]) for at in range(40)]
    together, random = Sampler(5000, seed=9), np.random.default_rng(0)
    rules = [together.rules(params, [1, 2])[0] for params in wishes]
    steps = dict.fromkeys(alone, 0)
    while any(step < 40 for step in steps.values()):
        keys = [
            int(key)
            for key in random.permutation(6)[: random.integers(1, 7)]
            if steps[int(key)] < 40
        ]
        if not keys:
            continue
        sampled = together.sample(
            [rules[key] for key in keys], torch.stack([logits[steps[key]] for key in keys])
        )
        for at, key in enumerate(keys):
            own = alone[key][steps[key]]
            assert sampled.tokens[at] == own.tokens[0]
            if key == 4:
                assert sampled.logprobs[at] == own.logprobs[0]
            steps[key] += 1


def test_a_random_number_is_that_of_its_seed_and_step():
    rules = AnswerRules(SamplingParams(), 77)
    steps = [0, 1, 63, 64, 200, 5, 64, 1000]
    assert [rules.number(step) for step in steps] == [uniform(77, step) for step in steps]


@pytest.mark.cases(1)
@pytest.mark.parametrize("along", ["seeds", "steps", "answers"])
def test_tokens_are_drawn_as_often_as_their_probability_says(along):
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, -3.0]])
    share = logits[0].softmax(0).numpy()
    num, sampler = 2000, Sampler(6, seed=1)
    if along == "seeds":
        rules = [sampler.rules(SamplingParams(seed=seed), [0])[0] for seed in range(num)]
    else:
        rules = sampler.rules(SamplingParams(seed=11, n=num if along == "answers" else 1), [0])
    drawn = [
        sampler.sample(rules, logits.expand(len(rules), -1)).tokens
        for _ in range(num // len(rules))
    ]
    seen = np.bincount(np.concatenate(drawn), minlength=6)
    assert seen.sum() == num
    assert (
        (seen - num * share) ** 2 / (num * share)
    ).sum() < 20.5  # 99.9 % at five degrees of freedom


def test_neighbouring_steps_and_seeds_know_nothing_of_each_other():
    numbers = np.array([[uniform(seed, step) for step in range(40)] for seed in range(40)])
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.1
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.1


def test_filters_keep_the_tokens_that_transformers_keeps():
    x = torch.randn(50, 3000, generator=torch.Generator().manual_seed(0)).double() * 4
    for k in (1, 7, 1500, 2999, 9000):
        assert torch.equal(only(x, top_k=k), TopKLogitsWarper(k)(None, x))
    for share in (0.05, 0.5, 0.93, 0.999):
        assert torch.equal(only(x, top_p=share), TopPLogitsWarper(share)(None, x))
        assert torch.equal(only(x / 50, top_p=share), TopPLogitsWarper(share)(None, x / 50))
        assert torch.equal(only(x, min_p=share), MinPLogitsWarper(share)(None, x))


def test_greedy_choice_with_penalties_is_what_transformers_chooses():
    prompts = torch.randint(0, 50, (30, 9), generator=torch.Generator().manual_seed(1))
    x = torch.randn(30, 50, generator=torch.Generator().manual_seed(2))
    sampler, params = Sampler(50), SamplingParams(temperature=0, repetition_penalty=1.8)
    rules = [sampler.rules(params, prompt)[0] for prompt in prompts.tolist()]
    theirs = RepetitionPenaltyLogitsProcessor(1.8)(prompts, x.clone()).argmax(-1)
    assert sampler.sample(rules, x).tokens.tolist() == theirs.tolist()
    assert theirs.tolist() != x.argmax(-1).tolist()


def test_a_draw_applies_the_filters_in_the_order_of_transformers():
    x = torch.randn(1, 400, generator=torch.Generator().manual_seed(5)) * 3
    warped = x
    for warper in (
        TemperatureLogitsWarper(0.8),
        MinPLogitsWarper(0.01),
        TopKLogitsWarper(30),
        TopPLogitsWarper(0.9),
    ):
        warped = warper(None, warped)
    sampler = Sampler(400)
    params = SamplingParams(temperature=0.8, min_p=0.01, top_k=30, top_p=0.9, seed=5, n=3000)
    drawn = sampler.sample(sampler.rules(params, [0]), x.expand(3000, -1)).tokens
    share = warped[0].softmax(0).numpy()
    assert set(drawn) <= set(np.flatnonzero(share))
    kept = share > 0.01
    assert abs(np.bincount(drawn, minlength=400) / 3000 - share)[kept].max() < 0.03


def test_tokens_of_equal_logits_stay_or_go_together():
    x = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0, 0.0]])
    for left in (only(x, top_k=3), only(x, top_p=0.86)):
        assert torch.isfinite(left[0]).tolist() == [True, True, True, True, True, False]


def test_answers_have_numbers_of_their_own_which_their_requests_seed_fixes():
    def drawn(seed, beside):
        sampler = Sampler(VOCAB, seed=beside)
        if beside:
            sampler.rules(SamplingParams(n=2), [1])
        rules = sampler.rules(SamplingParams(seed=seed, n=3, frequency_penalty=0.1), [0])
        logits = torch.zeros(3, VOCAB)
        return np.stack([sampler.sample(rules, logits).tokens for _ in range(20)], 1).tolist()

    first = drawn(5, 0)
    assert first == drawn(5, 8)
    assert first != drawn(6, 0)
    assert all(mine != other for mine, other in itertools.combinations(first, 2))
    assert first[0] == answer(lambda _: np.zeros(VOCAB, np.float32), seeded(5), [0], 20)[0]


def seeded(seed):
    return SamplingParams(seed=seed, frequency_penalty=0.1)


def test_each_answer_counts_its_own_tokens_and_all_know_the_prompt():
    sampler = Sampler(3)
    params = SamplingParams(temperature=0, n=2, repetition_penalty=2, frequency_penalty=2)
    one, other = sampler.rules(params, [0])
    logits = torch.tensor([[3.0, 2.0, 0.5]])
    assert sampler.sample([one], logits).tokens.tolist() == [1]
    assert sampler.sample([one, other], logits.expand(2, -1)).tokens.tolist() == [0, 1]


def test_requests_without_a_seed_differ_and_the_samplers_seed_fixes_them():
    def run(seed):
        sampler = Sampler(1000, seed=seed)
        rules = [sampler.rules(SamplingParams(), [0])[0] for _ in range(8)]
        return sampler.sample(rules, torch.zeros(8, 1000)).tokens.tolist()

    assert run(3) == run(3) != run(4)
    assert len(set(run(3))) > 6
    assert run(None) != run(None)


def test_greedy_answers_that_ask_for_nothing_have_no_rules():
    sampler = Sampler(4)
    rules = sampler.rules(SamplingParams(n=2, temperature=1e-9, top_k=3, top_p=0.1, seed=4), [1])
    assert rules == [None, None]
    x = torch.tensor([[0, 3, 3, 1], [9, 0, 1, 9]], dtype=torch.bfloat16)
    sampled = sampler.sample(rules, x)
    assert sampled.tokens.tolist() == [1, 0]
    assert sampled.tokens.dtype == np.int32
    assert sampled.logprobs is None


@pytest.mark.parametrize("special", [False, True])
def test_logits_that_are_no_numbers_are_an_error_and_nothing_is_taken(special):
    sampler, how = Sampler(4), float(special)
    params = SamplingParams(n=2, temperature=how, seed=1, frequency_penalty=how)
    rules = sampler.rules(params, [0])
    good = torch.tensor([[0.0, 1.0, 2.0, 0.0]] * 2)
    for wrong in (torch.nan, torch.inf):
        bad = good.clone()
        bad[1, 2] = wrong
        with pytest.raises(QuireError, match="NaN or infinite"):
            sampler.sample(rules, bad)
    if special:
        assert rules[0].num_tokens == 0
        assert not rules[0].counts.any()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"logit_bias": {8: 1.0}}, "token id 8"),
        ({"stop_token_ids": [1, 9]}, "token id 9"),
        ({"allowed_token_ids": [1, 9]}, "token id 9"),
        ({"allowed_token_ids": [2, 3], "stop_token_ids": [3], "min_tokens": 1}, "min_tokens"),
        ({"bad_words": ["a"]}, "bad_words needs a tokenizer"),
        ({"logprobs": 9}, "logprobs is 9"),
        ({"min_tokens": 2, "stop_token_ids": list(range(8))}, "min_tokens"),
        ({"structured_outputs": {"regex": "a"}}, "tokenizer"),
    ],
)
def test_parameters_that_the_model_cannot_follow_are_refused(asked, says):
    with pytest.raises(ConfigError, match=says):
        Sampler(8, eos_ids=[2]).rules(SamplingParams(**asked), [0])


def test_no_bad_word_comes_and_only_allowed_tokens_do():
    words = ["ab", "c", " de f "]
    for seed in range(30):
        asked = {"temperature": 2, "seed": seed, "ignore_eos": True}
        params = SamplingParams(bad_words=words, allowed_token_ids=[*range(8), VOCAB - 1], **asked)
        ids, _ = answer(Toy(seed), params, [1, 1], 60)
        text = "".join(" " if each == VOCAB - 1 else chr(97 + each) for each in ids)
        assert not any(word.strip() in text for word in words)
        assert {*ids} <= {*range(8), VOCAB - 1}


def test_a_bad_word_that_would_leave_no_token_may_come():
    params = SamplingParams(temperature=0, allowed_token_ids=[1], bad_words=["b"])
    assert answer(Toy(), params, [3, 3], 4)[0] == [1] * 4


def test_drafts_are_what_followed_the_same_tokens_before():
    def guess(text, most):
        return propose(np.frombuffer(text.encode(), np.uint8).astype(np.int32), most)

    def text(drafts):
        assert drafts.dtype == np.int32
        return "".join(map(chr, drafts))

    assert text(guess("the cat sat. the c", 4)) == "at s"
    assert text(guess("xaby..zabq..zab", 1)) == "q"  # the longest end counts, of three
    assert text(guess("zabq..xaby..zab", 1)) == "q"
    assert text(guess("xab1 xab2 xab", 1)) == "2"
    assert text(guess("abcdab", 9)) == "cdab"
    assert text(guess("aaaaaaaa", 3)) == "aaa"
    assert text(guess("ab1 ab2 ab", 2)) == "2 "  # the last place
    for none in ("", "a", "abc"):
        assert text(guess(none, 5)) == ""
    assert text(guess("abab", 0)) == ""


def test_a_token_of_probability_zero_is_not_drawn_by_the_smallest_number(monkeypatch):
    monkeypatch.setattr(AnswerRules, "number", lambda rules, at: 0.0)
    sampler = Sampler(3)
    rules = sampler.rules(SamplingParams(top_k=1), [0])
    assert sampler.sample(rules, torch.tensor([[0.0, 1.0, 2.0]])).tokens.tolist() == [2]


def test_frequency_counts_each_time_and_presence_once():
    x = torch.tensor([[3.0, 0.0]])
    for penalty, expected in ("frequency_penalty", [0, 0, 0, 1, 0]), ("presence_penalty", [0] * 5):
        sampler = Sampler(2)
        params = SamplingParams(temperature=0, logit_bias={1: 0.5}, **{penalty: 1.0})
        rules = sampler.rules(params, [0])
        assert [int(sampler.sample(rules, x).tokens[0]) for _ in range(5)] == expected


def test_the_end_may_be_drafted_behind_the_least_number_of_tokens_and_not_before():
    end = torch.tensor([[0.0, 0.0, 5.0]]).expand(4, -1)
    sampler = Sampler(3, eos_ids=EOS)
    rules = sampler.rules(SamplingParams(temperature=0, min_tokens=2), [0])
    sampled = sampler.sample(rules, end, [np.array([0, 0, 2], np.int32)])
    assert sampled.tokens[0].tolist() == [0, 0, 2, 2]


EXTREMES = {
    "temperature": st.sampled_from([0.0, 1e-5, 1.0, 1e6]),
    "top_p": st.sampled_from([1e-300, 1e-45, 0.5, 1.0]),
    "top_k": st.sampled_from([-1, 0, 1, 2**31 - 1]),
    "min_p": st.sampled_from([0.0, 1e-300, 1.0]),
    "repetition_penalty": st.sampled_from([1e-6, 1.0, 1e6]),
    "presence_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
    "frequency_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
    "logit_bias": st.sampled_from([None, dict.fromkeys(range(50), -100.0), {3: 100.0}]),
    "logprobs": st.sampled_from([None, 0, 50]),
}


PENALISED = {"temperature": 0.0, "repetition_penalty": 1e6}  # and all that may follow is negative


@pytest.mark.ci
@example(asked=[PENALISED], scale=3e38, masked=48, seed=2)
@example(asked=[PENALISED | {"temperature": 1e-5}], scale=3e38, masked=48, seed=2)
@example(asked=[PENALISED | {"top_p": 1e-300, "logprobs": 50}], scale=3e38, masked=48, seed=2)
@given(
    asked=st.lists(st.fixed_dictionaries(EXTREMES), min_size=1, max_size=4),
    scale=st.sampled_from([0.0, 1.0, 1e4, 1e30, 3e38]),
    masked=st.integers(0, 49),
    seed=st.integers(0, 99),
)
def test_accepted_parameters_fail_no_step(asked, scale, masked, seed):
    choosing = Sampler(50)
    logits = torch.from_numpy(np.random.default_rng(seed).uniform(-1, 1, (len(asked) + 1, 50)))
    logits = (logits * scale).float()
    logits[:, :masked] = -torch.inf
    rules = [choosing.rules(SamplingParams(**each, seed=1), [3, 49])[0] for each in asked]
    for _ in range(3):
        tokens = choosing.sample([*rules, None], logits).tokens
        assert ((masked <= tokens) & (tokens < 50)).all()
        assert tokens[-1] == logits[-1].argmax()
