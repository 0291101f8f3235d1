"""Requests in shapes that few clients send: legal ones are answered, others are refused by the name of the field."""

import json

import pytest
from serve_help import fixtures

server, nothing_stays = fixtures()

SAID = [{"role": "user", "content": "What is a list?"}]
PATHS = {
    "chat": ("/v1/chat/completions", {"messages": SAID, "max_tokens": 3}),
    "completion": ("/v1/completions", {"prompt": "A list", "max_tokens": 3}),
    "message": ("/v1/messages", {"messages": SAID, "max_tokens": 3}),
    "response": ("/v1/responses", {"input": "What is a list?", "max_output_tokens": 3}),
}


def ask(server, api, **more):
    path, base = PATHS[api]
    return server.post(path, base | {"temperature": 0} | more)


def refused(server, api, **more):
    answer = ask(server, api, **more)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("api", "given", "same"),
    [
        ("chat", {"max_tokens": 2.0, "top_k": 5.0, "n": 1.0}, {"max_tokens": 2}),
        ("completion", {"prompt": [65.0, 66, 67.0]}, {"prompt": [65, 66, 67]}),
        ("completion", {"priority": 0.0, "max_tokens": 2e0}, {"max_tokens": 2}),
        ("message", {"max_tokens": 2.0}, {"max_tokens": 2}),
        ("response", {"max_output_tokens": 2.0}, {"max_output_tokens": 2}),
    ],
)  # fmt: skip
def test_a_whole_float_is_an_integer(server, api, given, same):
    keys = ("choices", "content", "usage")
    one, other = (ask(server, api, **each).json() for each in (given, same))
    assert not one.get("error")
    for key in {*keys} & one.keys():
        assert drop_hits(one[key]) == drop_hits(other[key])


def drop_hits(part):
    return {k: v for k, v in part.items() if "cache" not in k and "details" not in k and "input" not in k} if isinstance(part, dict) else part  # fmt: skip


def test_many_whole_floats_are_read_at_once_and_others_are_refused(server):
    assert ask(server, "completion", prompt=[65.0] * 4000).status_code == 200
    for given in ({"max_tokens": 2.5}, {"prompt": [65.5]}, {"prompt": [65.0, 65.5]}):
        error = refused(server, "completion", **given)
        assert "float" in error["message"]
        assert error["param"].partition("[")[0] in given


@pytest.mark.parametrize(
    ("api", "given"),
    [
        ("message", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "is_error": None}]}]}),
        ("message", {"system": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral", "ttl": None}}]}),
        ("response", {"input": [{"role": "user", "content": [{"type": "input_text", "text": None}]}]}),
        ("response", {"tools": [{"type": "function", "name": "f", "description": None}]}),
    ],
)  # fmt: skip
def test_a_null_inside_of_a_list_means_absent(server, api, given):
    assert ask(server, api, **given).status_code == 200


def test_a_body_of_nothing_but_nulls_is_read_a_bounded_number_of_times(server):
    parts = [{"type": "text", "text": "a", "is_error": None}] * 20_000
    error = refused(server, "message", messages=[{"role": "user", "content": parts}])
    assert "is_error: Expected `bool`, got `null`" in error["message"]


@pytest.mark.parametrize(
    ("api", "given", "param", "said"),
    [
        ("chat", {"logit_bias": {"a": 1}}, "logit_bias", 'got {"a":1}'),
        ("chat", {"logit_bias": {"500": 1}}, "logit_bias", "token id 500; this model's are below"),
        ("chat", {"stop_token_ids": [3, 500]}, "stop_token_ids", "token id 500"),
        ("completion", {"allowed_token_ids": [500]}, "allowed_token_ids", "token id 500"),
        ("completion", {"prompt": [500]}, "prompt", "token id 500"),
        ("completion", {"prompt": [-1]}, "prompt", "token id -1"),
        ("completion", {"bad_words": ["a" * 257]}, "bad_words", "length <= 256"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].type", '"image_url" is not offered'),
        ("chat", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", '"custom" is not offered'),
        ("response", {"prompt": {"id": "x"}}, "prompt", "prompt is not offered"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_and_shows_the_value(server, api, given, param, said):
    error = refused(server, api, **given)
    assert error["param"] == param
    assert said in error["message"]


def test_an_error_repeats_no_long_value(server):
    for given in (
        {"guided_regex": "(" * 50_000},
        {"bad_words": ["a"] * 5000},
        {"reuse": "x" * 5000},
    ):
        assert len(refused(server, "completion", **given)["message"]) <= 2003


@pytest.mark.parametrize("prompt", ["A list keeps its order", [65, 66, 67, 68, 69, 70, 71, 72]])
def test_a_truncated_prompt_is_echoed_as_it_is_read(server, prompt):
    asked = {"prompt": prompt, "echo": True, "truncate_prompt_tokens": 5, "logprobs": 0}
    (choice,) = ask(server, "completion", **asked).json()["choices"]
    told = choice["logprobs"]
    assert choice["text"] == "".join(told["tokens"])
    assert told["text_offset"] == [*range(len(told["tokens"]))]
    assert len(told["tokens"]) == 5 + 3


def test_the_older_name_of_a_message_s_schema_is_followed(server):
    schema = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}
    answer = ask(server, "message", output_format=schema, max_tokens=20).json()
    assert json.loads(answer["content"][0]["text"]) in ("yes", "no")


def test_an_empty_cache_key_of_a_response_is_no_session(server):
    assert ask(server, "response", prompt_cache_key="").status_code == 200
