"""Requests as clients send them, and what they are told of bad ones."""

import json

import pytest

from quire.core import Hint
from quire.errors import ConfigError, DeadlinePassed, OutOfBlocks, PinBudgetExceeded
from quire.serve.protocol import FIELDS, ChatRequest, CompletionRequest, Detokenize
from quire.web.bodies import read
from quire.web.errors import ApiError, refused


def refusal(kind, body):
    with pytest.raises((ApiError, ConfigError)) as raised:
        read(kind, body)
    error = refused(raised.value, FIELDS)
    assert error.status == 400
    return error


def test_a_request_has_what_was_sent_and_defaults():
    asked = read(CompletionRequest, b'{"prompt": "hi", "temperature": 0, "top_k": 3, "user": "x"}')
    assert asked.prompts() == ["hi"]
    assert (asked.temperature, asked.top_k, asked.top_p) == (0.0, 3, None)
    assert asked.max_tokens == 16
    assert asked.options() == {"priority": 0, "deadline_s": None, "hint": Hint()}


def test_chats_may_name_their_most_tokens_in_two_ways():
    def most(given):
        return read(ChatRequest, b'{"messages": []%s}' % given).max_tokens

    assert most(b"") is None
    assert most(b', "max_tokens": 3') == 3
    assert most(b', "max_tokens": 3, "max_completion_tokens": 2') == 2


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        (b'["a", "b"]', ["a", "b"]),
        (b"[1, 2]", [[1, 2]]),
        (b"[[1, 2], [3]]", [[1, 2], [3]]),
        (b'"a"', ["a"]),
    ],
)
def test_a_prompt_is_text_or_ids_or_several_of_one_kind(prompt, prompts):
    assert read(CompletionRequest, b'{"prompt": %s}' % prompt).prompts() == prompts


@pytest.mark.parametrize("prompt", [b'["a", 1]', b'["a", [1]]', b"[" + b'"a",' * 300 + b'"a"]'])
def test_prompts_of_two_kinds_or_too_many_are_refused(prompt):
    with pytest.raises(ConfigError, match="prompts of one kind"):
        read(CompletionRequest, b'{"prompt": %s}' % prompt).prompts()


def test_an_error_names_the_field_the_value_and_what_it_should_be():
    error = refusal(CompletionRequest, b'{"prompt": "a", "temperature": "hot"}')
    assert error.param == "temperature"
    assert 'got "hot"' in str(error)
    assert "float" in str(error)


def test_an_error_shows_a_number_that_is_none_as_it_was_sent():
    error = refusal(CompletionRequest, b'{"prompt": "a", "temperature": 1e999}')
    assert str(error) == "temperature: Number out of range, got 1e999"


def test_an_error_inside_a_list_has_its_place_and_long_values_are_cut():
    body = b'{"messages": [{"role": "user"}, {"role": %s}]}' % (b"[" + b"1," * 500 + b"1]")
    error = refusal(ChatRequest, body)
    assert error.param == "messages[1].role"
    assert len(str(error)) < 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'"a"',
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": {"a": 1}}',
        b"{}",
    ],
)
def test_a_body_that_is_no_request_is_refused(body):
    assert str(refusal(CompletionRequest, body))


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (b'"n": 0', "n"),
        (b'"n": 129', "n"),
        (b'"prompt_logprobs": 21', "prompt_logprobs"),
        (b'"prompt_logprobs": 1, "stream": true', "prompt_logprobs"),
        (b'"stream_options": {}', "stream_options"),
        (b'"best_of": 0', "best_of"),
        (b'"best_of": 3, "stream": true', "best_of"),
        (b'"priority": -101', "priority"),
        (b'"logprobs": 21', "logprobs"),
        (b'"stop": [%s"a"]' % (b'"a",' * 64), "stop"),
    ],
)
def test_unsupported_fields_are_refused_by_name(given, param):
    assert refusal(CompletionRequest, b'{"prompt": "a", %s}' % given).param == param


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (b'"top_logprobs": 2', "top_logprobs"),
        (b'"response_format": {"type": "json_schema"}', "response_format"),
    ],
)
def test_unsupported_fields_of_a_chat_are_refused_by_name(given, param):
    assert refusal(ChatRequest, b'{"messages": [], %s}' % given).param == param


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_a_field_that_is_null_is_as_if_it_were_absent(kind):
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    plain = read(kind, json.dumps(body).encode())
    for name in kind.__struct_fields__:
        if name not in ("prompt", "messages", "max_tokens"):
            assert read(kind, json.dumps(body | {name: None}).encode()) == plain
    options = {"n": None, "stream": True, "stream_options": {"include_usage": None}, "seed": 2**62}
    made = read(kind, json.dumps(body | options | {"logit_bias": {"5": 1}}).encode())
    assert (made.n, made.stream_options.include_usage) == (1, False)
    assert (made.seed, made.logit_bias) == (2**62, {5: 1.0})
    for wrong in ({"logit_bias": {"5": None}}, {"stop": [None]}, {"messages": [{"role": None}]}):
        with pytest.raises(ApiError, match=r"null|required"):
            read(ChatRequest, json.dumps(body | wrong).encode())


def test_a_null_before_malformed_json_is_refused_like_any_malformed_body():
    body = rb'{"prompt": "a", "n": null, "cache_salt": "\ud800"}'
    with pytest.raises(ApiError) as raised:
        read(CompletionRequest, body)
    assert raised.value.status == 400


@pytest.mark.parametrize(
    ("given", "num_prompt_logprobs"),
    [
        (b'"logprobs": 2', None),
        (b'"echo": true', None),
        (b'"echo": true, "max_tokens": null', None),
        (b'"echo": true, "max_tokens": 0', 0),
        (b'"echo": true, "logprobs": 2', 2),
        (b'"echo": true, "logprobs": 2, "prompt_logprobs": 5', 5),
        (b'"prompt_logprobs": 0', 0),
    ],
)
def test_a_prompt_is_scored_only_where_its_scores_are_told(given, num_prompt_logprobs):
    asked = read(CompletionRequest, b'{"prompt": "a", %s}' % given)
    assert asked.num_prompt_logprobs == num_prompt_logprobs


def test_a_limit_is_refused_by_the_name_it_was_given_by():
    assert (
        refusal(ChatRequest, b'{"messages": [], "max_completion_tokens": 0}').param
        == "max_completion_tokens"
    )


@pytest.mark.parametrize("field", ["ttl_s", "returns_in_s"])
@pytest.mark.parametrize("seconds", [-3, 0, 1e10])
def test_seconds_of_a_hint_that_cannot_be_are_refused_with_400(field, seconds):
    body = b'{"prompt": "a", "%s": %r}' % (field.encode(), seconds)
    with pytest.raises(ConfigError, match=f"{field} must be a number of seconds") as caught:
        read(CompletionRequest, body).options()
    assert refused(caught.value).status == 400


def test_hints_are_extension_fields():
    def hint(given):
        return read(CompletionRequest, b'{"prompt": "a", %s}' % given).options()["hint"]

    assert hint(b'"reuse": "never"') == Hint("never")
    assert hint(b'"session_id": "s"') == Hint("session", session_id="s")
    assert hint(b'"ttl_s": 5') == Hint(ttl_s=5.0)
    assert hint(b'"returns_in_s": 7, "within": 3') == Hint(returns_in_s=7.0, within=3.0)
    assert hint(b'"returns_in_s": 7') == Hint(returns_in_s=7.0)
    with pytest.raises(ConfigError, match="session_id"):
        hint(b'"reuse": "session"')


def test_errors_are_openais_objects():
    error = ApiError(429, "come back", code="overloaded", headers={"Retry-After": "1"})
    assert error.document() == {
        "error": {"message": "come back", "type": "rate_limit_error", "param": None, "code": "overloaded"}
    }  # fmt: skip


def test_refusals_of_quire_are_client_errors_and_others_are_the_servers():
    assert (
        refused(ConfigError("temperature must be at least 0, got -1.0"), FIELDS).param
        == "temperature"
    )
    assert refused(ConfigError("something is wrong"), FIELDS).param is None
    full = OutOfBlocks("no room", group="full", needed=9, free=1, cached=0, active=0)
    assert (refused(full).status, refused(full).code) == (400, "out_of_memory")
    pinned = OutOfBlocks("no room", group="full", needed=9, free=1, cached=0, active=8)
    assert (refused(pinned).status, refused(pinned).code) == (503, "out_of_memory")
    assert refused(pinned).headers == {"Retry-After": "10"}
    budget = PinBudgetExceeded("no room", group="full", needed=9, free=1, cached=0, active=8)
    assert refused(budget).status == 400
    late = refused(DeadlinePassed("too late"))
    assert (late.status, late.param, late.code) == (504, "deadline_s", "deadline_passed")
    assert refused(RuntimeError("boom")).status == 500


def test_token_ids_are_integers():
    assert refusal_of(b'{"tokens": [1, 1.5]}').param == "tokens[1]"
    assert refusal_of(b'{"tokens": [true]}').param == "tokens[0]"


def refusal_of(body):
    with pytest.raises(ApiError) as raised:
        read(Detokenize, body)
    return raised.value


def test_a_message_has_text_and_tools_have_names():
    image = b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}'
    error = refusal(ChatRequest, image)
    assert error.param == "messages[0].content[0].type"
    assert "image_url" in str(error)
    tool = b'{"messages": [], "tools": [{"type": "function", "function": {}}]}'
    assert refusal(ChatRequest, tool).param == "tools[0].function"
