"""Answers to a schema or a regex match it, whatever the model would have said."""

import importlib.util
import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_help import trained_model
from sampling_help import Toy
from transformers import AutoTokenizer

import quire
from quire import ops
from quire.engines.loop import Engine
from quire.engines.loop.params import SamplingParams
from quire.engines.loop.sampling import Sampler
from quire.errors import ConfigError
from turns import by_turns

LLMatcher = pytest.importorskip("llguidance").LLMatcher
TOKENIZER = AutoTokenizer.from_pretrained(quire.demo_model())
EOS = TOKENIZER.eos_token_id
VOCAB = 264
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
CASES = {
    "regex": (
        {"structured_outputs": {"regex": r"[a-f]{3}-(é|😀)+[0-9]{2}"}},
        lambda text: re.fullmatch(r"[a-f]{3}-(é|😀)+[0-9]{2}", text),
    ),
    "schema": (
        {"structured_outputs": {"json": SCHEMA}},
        lambda text: set(json.loads(text)) == {"name", "old"},
    ),
    "blanks": (
        {"structured_outputs": {"json": SCHEMA}, "logit_bias": dict.fromkeys(b" \n\t\r", 100.0)},
        lambda text: not re.search(r"\s\s", re.sub(r'"[^"]*"', "s", text)),
    ),
    "schema as text": (
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        lambda text: isinstance(json.loads(text)["old"], bool),
    ),
}


def sampler():
    return Sampler(VOCAB, tokenizer=TOKENIZER, eos_ids=[EOS])


def run(params, model, drafter=None, most=200):
    """Return the tokens of an answer, without the end token; None if it did not come to one."""
    choosing, text = sampler(), [1, 2]
    rules = choosing.rules(params, text)
    for _ in range(most):
        drafts = np.asarray(drafter(text) if drafter else [], np.int32)
        logits = [model([*text, *drafts[:j]]) for j in range(len(drafts) + 1)]
        (new,) = choosing.sample(rules, torch.from_numpy(np.stack(logits)), [drafts]).tokens
        for token in new.tolist():
            if token == EOS:
                return text[2:]
            text.append(token)
    return None


@pytest.mark.cases(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_guided_answer_matches_its_grammar(case, temperature):
    asked, matches = CASES[case]
    ended = 0
    for seed in range(4):
        model = Toy(seed, VOCAB)
        params = SamplingParams(temperature=temperature, seed=seed, **asked)
        answer = run(params, model)
        if answer is not None:
            assert matches(bytes(answer).decode())
            ended += 1
            drafted = run(
                params, model, lambda text, plain=answer: [*plain[len(text) - 2 :][:3], 255]
            )
            assert drafted == answer
    assert ended >= (2 if temperature else 1)


LETTERS = 'ab\\"/é😀 \n.|'


@st.composite
def forms(draw, depth=2):
    """Draw a form as a regex of Python, one of llguidance, a right-hand side of Lark, and one of GBNF."""
    kind = draw(
        st.sampled_from(["text", "one of", "some of", "both", "up to"] if depth else ["text"])
    )
    if kind == "text":
        text = draw(st.text(LETTERS, min_size=1, max_size=3))
        quoted = json.dumps(text, ensure_ascii=False)
        return (
            re.escape(text),
            re.sub(r"\W", lambda at: f"\\x{{{ord(at[0]):x}}}", text),
            quoted,
            quoted,
        )
    left, right = draw(forms(depth - 1)), draw(forms(depth - 1))
    if kind == "one of":
        return tuple(f"({a}|{b})" for a, b in zip(left, right, strict=True))
    if kind == "both":
        return tuple(
            f"({a}{between}{b})"
            for a, b, between in zip(left, right, ("", "", " ", " "), strict=True)
        )
    return tuple(f"({a}){'+' if kind == 'some of' else '?'}" for a in left)


@pytest.mark.parametrize("form", ['(("a")+)+', '("a"{2}){2}', '(("a"+)?){1,3}'])
def test_a_repetition_in_gbnf_may_be_repeated(form):
    asked = {"grammar": f'root ::= "b" {form} "c"'}
    answer = run(SamplingParams(structured_outputs=asked, temperature=0.0), Toy(1, VOCAB), most=60)
    assert answer is None or re.fullmatch("ba*c", bytes(answer).decode())


@pytest.mark.cases(2)
@settings(max_examples=40, deadline=None)
@given(form=forms(), seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 1.0, 3.0]))
def test_answers_match_drawn_regexes_and_grammars_of_both_kinds(form, seed, temperature):
    python, regex, lark, gbnf = form
    model = Toy(seed, VOCAB)
    for asked in (
        {"regex": regex},
        {"grammar": f"start: {lark}"},
        {"grammar": f"root ::= {gbnf}"},
    ):
        params = SamplingParams(temperature=temperature, seed=seed, structured_outputs=asked)
        answer = run(params, model, most=60)
        if answer is not None:
            assert re.fullmatch(python, bytes(answer).decode()), (asked, answer)


@pytest.mark.cases(2)
@settings(max_examples=40, deadline=None)
@given(
    choice=st.lists(st.text(max_size=6), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 1.0, 3.0]),
)
def test_an_answer_is_one_of_the_texts_of_a_choice(choice, seed, temperature):
    params = SamplingParams(
        temperature=temperature, seed=seed, structured_outputs={"choice": choice}
    )
    assert bytes(run(params, Toy(seed, VOCAB))).decode() in choice


def test_half_of_a_surrogate_pair_is_no_text_of_a_choice():
    with pytest.raises(ConfigError, match="structured_outputs"):
        sampler().rules(SamplingParams(structured_outputs={"choice": ["\ud800"]}), [1])


def test_a_grammar_binds_its_own_request_only_and_each_answer_goes_on_in_it():
    choosing = sampler()
    bound, other = choosing.rules(
        SamplingParams(temperature=0, n=2, structured_outputs={"regex": "ab|cd"}), [1]
    )
    (free,) = choosing.rules(SamplingParams(temperature=0), [1])
    x = torch.zeros(2, VOCAB)
    x[:, ord("z")], x[:, ord("d")], x[:, ord("c")] = 5.0, 4.0, 3.0
    assert choosing.sample([bound, free], x).tokens.tolist() == [ord("c"), ord("z")]
    for rules, rest in (other, b"cd"), (bound, b"d"):
        for letter in rest:
            assert choosing.sample([rules], x[:1]).tokens.tolist() == [letter]
        assert choosing.sample([rules], x[:1]).tokens.tolist() == [EOS]


def test_logprobs_of_guided_tokens_are_the_models_own():
    choosing = sampler()
    rules = choosing.rules(
        SamplingParams(temperature=0, structured_outputs={"regex": "ab"}, logprobs=1), [1]
    )
    x = torch.zeros(1, VOCAB)
    x[:, ord("z")] = 5.0
    ((told,),) = choosing.sample(rules, x).logprobs
    assert list(told) == [ord("a"), ord("z")]
    assert told[ord("a")].logprob == pytest.approx(float(x.log_softmax(-1)[0, 0]))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            {"regex": "((("},
            r"regex cannot be used: regex parse error:\n    \(\(\(\n      \^\nerror: unclosed group$",
        ),
        ({"regex": r"a\b"}, "regex cannot be used: lookarounds not supported"),
        ({"regex": "a\\"}, "regex cannot be used: the backslash at its end, character 2"),
        ({"json": {"type": "objct"}}, "json cannot be used.*objct"),
        ({"json": "{no"}, "json cannot be used"),
        ({"grammar": 'start: "a" b\nb: "c'}, r"grammar cannot be used: 2\(6\): lexer error"),
        ({"grammar": "start: nothing"}, r"grammar cannot be used: at 1\(8\): unknown name"),
        ({"grammar": 'root ::= "a" | "b'}, "grammar cannot be used: .*line 1"),
    ],
)
def test_a_grammar_that_cannot_be_is_refused_when_it_is_asked_for(asked, says):
    with pytest.raises(ConfigError, match=re.compile(says, re.DOTALL)):
        sampler().rules(SamplingParams(structured_outputs=asked), [1])


DEAD = [
    {"json": {"$ref": "#"}},
    {"json": {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}},
    {"regex": "(a?){3000}a{3000}"},
    {"json": {"type": "string", "pattern": "^(a?){3000}a{3000}$"}},
]  # fmt: skip


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("asked", "more"), by_turns(DEAD, [{}, {"n": 2}, {"speculation": 2}, {"n": 1, "best_of": 2}])
)
def test_a_grammar_that_leads_nowhere_ends_its_own_request_with_an_error(asked, more):
    engine = Engine(trained_model(), TOKENIZER, num_blocks=60)
    dead = engine.add_request(
        "Once", SamplingParams(temperature=0, max_tokens=40, structured_outputs=asked, **more)
    )
    other = engine.add_request("Once", SamplingParams(temperature=0, max_tokens=12))
    told = {}
    while engine.has_unfinished():
        told |= {output.request_id: output for output in engine.step()}
    assert isinstance(told[dead].error, ConfigError)
    assert re.match(
        r"structured_outputs\.(json|regex) leads to a place where no token may come",
        str(told[dead].error),
    )
    assert told[dead].finished
    assert told[other].error is None
    assert told[other].outputs[0].num_tokens == 12
    ops.check(engine.manager)
    assert engine.manager.num_active == 0


def test_a_grammar_is_compiled_once_and_each_answer_begins_at_its_start(monkeypatch):
    choosing, count = sampler(), []
    compiled = LLMatcher.grammar_from_regex
    monkeypatch.setattr(
        "llguidance.LLMatcher.grammar_from_regex", lambda text: count.append(text) or compiled(text)
    )
    for _ in range(3):
        (rules,) = choosing.rules(
            SamplingParams(temperature=0, structured_outputs={"regex": "ab"}), [1]
        )
        for letter in (*b"ab", EOS):
            assert choosing.sample([rules], torch.zeros(1, VOCAB)).tokens.tolist() == [letter]
    assert count == ["ab"]


def test_where_llguidance_is_missing_the_command_that_installs_it_is_said(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "quire.extras.find_spec", lambda name: None if name == "llguidance" else real(name)
    )
    with pytest.raises(ConfigError, match=r"structured_outputs needs llguidance: pip install .*hf"):
        sampler().rules(SamplingParams(structured_outputs={"regex": "a"}), [1])
