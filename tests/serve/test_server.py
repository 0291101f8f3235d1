"""A server on quire-tiny, asked by the official client: answers are those of the model."""

import asyncio
import json
import re
from types import SimpleNamespace

import openai
import pytest
import torch
from serve_help import fixtures, in_pieces, tiny

import plain_http
from quire.core import CacheManager
from quire.observe.requests import RequestLog
from quire.serve.operator import Operator
from quire.serve.pins import ServerPins

TALK = [{"role": "user", "content": "What is a list?"}]
TEXT = "A list is a"


server, nothing_stays = fixtures()


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def generated(ids, num_tokens):
    """The text that the model itself generates."""
    model, tokenizer = tiny()
    row = torch.tensor([ids])
    made = model.generate(
        row, attention_mask=torch.ones_like(row), max_new_tokens=num_tokens, do_sample=False,
        pad_token_id=256,
    )  # fmt: skip
    return tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True)


def chat(client, talk=TALK, **given):
    options = {"max_tokens": 12, "temperature": 0, **given}
    return client.chat.completions.create(model="quire-tiny", messages=talk, **options)


def complete(client, prompt=TEXT, **given):
    options = {"max_tokens": 12, "temperature": 0, **given}
    return client.completions.create(model="quire-tiny", prompt=prompt, **options)


def test_a_chat_is_answered_as_the_model_answers(client):
    tokenizer = tiny()[1]
    ids = tokenizer.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"]
    said = chat(client)
    assert said.choices[0].message.content == generated(ids, 12)
    assert said.choices[0].message.role == "assistant"
    assert said.choices[0].finish_reason == "length"
    assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (len(ids), 12)
    assert said.usage.total_tokens == len(ids) + 12


def test_a_completion_too_from_text_and_from_ids(client):
    ids = tiny()[1](TEXT)["input_ids"]
    text = generated(ids, 12)
    assert complete(client).choices[0].text == text
    assert complete(client, ids).choices[0].text == text


def test_a_stream_is_the_same_text_in_pieces(client, monkeypatch):
    in_pieces(monkeypatch)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    pieces = [c.choices[0].delta.content for c in chunks if c.choices]
    whole = chat(client)
    assert len([*filter(None, pieces)]) > 1
    assert "".join(each or "" for each in pieces) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 12
    text = "".join(c.choices[0].text for c in complete(client, stream=True))
    assert text == complete(client).choices[0].text


def test_cached_tokens_are_those_that_were_found(server, client):
    prompt = [7] * 5 + [65 + at % 26 for at in range(200)]
    first, second = (complete(client, prompt, max_tokens=2).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens == 0
    size = server.manager.block_size
    assert second.prompt_tokens_details.cached_tokens == (len(prompt) - 1) // size * size
    salted = complete(client, prompt, max_tokens=2, extra_body={"cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_n_choices_differ_and_a_seed_fixes_them(client):
    given = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 24}
    first = [each.message.content for each in chat(client, **given).choices]
    assert first == [each.message.content for each in chat(client, **given).choices]
    assert len(set(first)) == 3
    assert first != [each.message.content for each in chat(client, **given | {"seed": 8}).choices]
    pieces = {0: "", 1: "", 2: ""}
    for chunk in chat(client, **given, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert list(pieces.values()) == first


def test_several_prompts_have_their_own_choices(client):
    prompts = ["A list", "A tuple is", "A dict maps"]
    said = complete(client, prompts)
    assert [each.index for each in said.choices] == [0, 1, 2]
    alone = [complete(client, each) for each in prompts]
    assert [each.text for each in said.choices] == [each.choices[0].text for each in alone]
    assert said.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone)
    assert said.usage.completion_tokens == 36


def test_log_probabilities_are_the_models(client):
    tokenizer = tiny()[1]
    said = chat(client, logprobs=True, top_logprobs=3, max_tokens=4)
    entries = said.choices[0].logprobs.content
    ids = tokenizer.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"]
    with torch.inference_mode():
        logits = tiny()[0](torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    best = logits.topk(3)
    assert entries[0].logprob == pytest.approx(best.values[0].item(), abs=1e-3)
    tops = [each.logprob for each in entries[0].top_logprobs]
    assert tops == pytest.approx(best.values.tolist(), abs=1e-3)
    assert b"".join(bytes(each.bytes) for each in entries).decode("utf-8", "replace") == (
        said.choices[0].message.content)  # fmt: skip
    legacy = complete(client, logprobs=2, max_tokens=4).choices[0].logprobs
    assert len(legacy.tokens) == len(legacy.token_logprobs) == len(legacy.top_logprobs) == 4


def test_a_stop_string_ends_and_is_left_out(client):
    text = complete(client, max_tokens=24).choices[0].text
    stop = text[8:10]
    ended = complete(client, max_tokens=24, stop=[stop]).choices[0]
    assert ended.text == text[: text.index(stop)]
    assert ended.finish_reason == "stop"
    pieces = complete(client, max_tokens=24, stop=[stop], stream=True)
    assert "".join(each.choices[0].text for each in pieces) == ended.text


def test_tokens_are_limited_to_those_allowed_and_without_bad_words(client):
    only = [*b"abc "]
    given = {"max_tokens": 40, "temperature": 2, "seed": 1}
    text = complete(client, **given, extra_body={"allowed_token_ids": only}).choices[0].text
    assert {*text} <= {*"abc "}
    assert "ab" in text
    limits = {"allowed_token_ids": only, "bad_words": ["ab", "c"]}
    text = chat(client, **given, extra_body=limits).choices[0].message.content
    assert {*text} <= {*"ab "}
    assert "ab" not in text


def test_a_prompt_is_truncated_to_its_last_tokens(client):
    def truncated(prompt, most, **more):
        return complete(
            client, prompt, extra_body={"truncate_prompt_tokens": most}, **{"max_tokens": 4} | more
        )

    said = truncated("What is it? " + TEXT, len(TEXT))
    assert said.choices[0].text == complete(client, max_tokens=4).choices[0].text
    assert said.usage.prompt_tokens == len(TEXT)
    assert truncated([[65] * 9, [66] * 3], 5).usage.prompt_tokens == 8
    most = client.models.retrieve("quire-tiny").max_model_len
    assert truncated([65] * (most + 9), -1, max_tokens=2).usage.prompt_tokens == most - 2
    for wrong in (0, -2):
        with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
            truncated(TEXT, wrong)


def test_models_tokens_and_health(server, client):
    (model,) = client.models.list().data
    assert model.id == "quire-tiny"
    assert client.models.retrieve("quire-tiny") == model
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
        client.models.retrieve("gpt-4")
    ids = tiny()[1](TEXT)["input_ids"]
    told = server.post("/tokenize", {"prompt": TEXT}).json()
    assert (told["tokens"], told["count"]) == (ids, len(ids))
    chat_ids = server.post("/tokenize", {"messages": TALK}).json()["tokens"]
    assert chat_ids == tiny()[1].apply_chat_template(TALK, add_generation_prompt=True)["input_ids"]
    open_ids = server.post("/tokenize", {"messages": TALK, "add_generation_prompt": False}).json()[
        "tokens"
    ]
    assert open_ids == chat_ids[: len(open_ids)] != chat_ids
    back = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert back == tiny()[1].decode(ids)
    assert server.get("/health").status_code == 200


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


def test_a_tool_that_must_be_called_is_called_whole_and_streamed(client):
    given = {"tools": [ADD], "tool_choice": "required", "max_tokens": 60}
    said = chat(client, **given).choices[0]
    (call,) = said.message.tool_calls
    assert call.function.name == "add"
    assert 0 <= json.loads(call.function.arguments)["a"] <= 9
    assert said.finish_reason == "tool_calls"
    chunks = [each.choices[0] for each in chat(client, **given, stream=True)]
    (streamed,) = [each.delta.tool_calls[0] for each in chunks if each.delta.tool_calls]
    assert streamed.function.arguments == call.function.arguments
    assert not any(each.delta.content for each in chunks)
    assert chunks[-1].finish_reason == "tool_calls"


def test_a_tool_that_is_none_of_those_given_is_shown_as_it_was_sent(client):
    none = {"type": "function", "function": {"name": "subtract"}}
    with pytest.raises(
        openai.BadRequestError, match=re.escape('got {"function":{"name":"subtract"')
    ):
        chat(client, tools=[ADD], tool_choice=none)


def test_the_best_of_many_answers_are_the_likeliest_ones(client):
    given = {"temperature": 1.5, "seed": 11, "max_tokens": 6, "logprobs": 0}
    said = complete(client, n=5, **given).choices
    means = [sum(ps) / len(ps) for ps in (each.logprobs.token_logprobs for each in said)]
    likeliest = sorted(range(5), key=lambda at: -means[at])[:2]
    best = complete(client, n=2, best_of=5, **given).choices
    assert [each.text for each in best] == [said[at].text for at in likeliest]
    assert [each.index for each in best] == [0, 1]
    del given["logprobs"]
    (alone,) = complete(client, n=1, best_of=5, **given).choices
    assert (alone.text, alone.logprobs) == (best[0].text, None)
    with pytest.raises(openai.BadRequestError, match="best_of is 1, below n, 2"):
        complete(client, n=2, best_of=1)


def test_tools_that_need_not_be_called_are_read_and_leave_an_answer_text(client):
    text = chat(client, max_tokens=24)
    said = chat(client, max_tokens=24, tools=[ADD])
    assert said.choices[0].message.content
    assert said.choices[0].message.tool_calls is None
    assert said.usage.prompt_tokens > text.usage.prompt_tokens + len('"name":"add"')


@pytest.mark.parametrize("most", [1, 5, 12, 20])
def test_a_call_that_max_tokens_cuts_is_no_content(client, most):
    given = {"tools": [ADD], "tool_choice": "required", "max_tokens": most}
    (said,) = chat(client, **given).choices
    assert (said.message.content, said.message.tool_calls, said.finish_reason) == (
        "",
        None,
        "length",
    )
    chunks = [each.choices[0] for each in chat(client, **given, stream=True)]
    assert not any(each.delta.content or each.delta.tool_calls for each in chunks)
    assert chunks[-1].finish_reason == "length"


def test_tools_without_a_place_in_the_template_are_refused(server, client, monkeypatch):
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    monkeypatch.setattr(server.service.reader.tokenizer, "chat_template", plain)
    for choice in ("auto", "required"):
        with pytest.raises(
            openai.BadRequestError, match="tools: the model's chat template"
        ) as told:
            chat(client, tools=[ADD], tool_choice=choice)
        assert told.value.param == "tools"
    assert chat(client, tools=[ADD], tool_choice="none").choices[0].message.content


def test_an_answer_has_the_form_that_is_asked_for(client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    said = chat(client, response_format=form, max_tokens=40).choices[0].message.content
    assert json.loads(said)["ok"] in (True, False)
    completed = (
        complete(client, max_tokens=40, extra_body={"response_format": form}).choices[0].text
    )
    assert json.loads(completed)["ok"] in (True, False)
    form["json_schema"]["schema"] = {"type": "nothing"}
    with pytest.raises(openai.BadRequestError, match="response_format cannot be used"):
        chat(client, response_format=form)


INNER = {"type": "object", "properties": {"x": {"enum": [7]}}, "required": ["x"],
         "additionalProperties": False}  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", ["required", {"type": "function", "function": {"name": "one"}}])
def test_a_tool_that_must_be_called_may_have_definitions_of_its_own(client, form):
    def tool(name, inner):
        parameters = {"$defs": {"Inner": inner}, "type": "object", "additionalProperties": False,
                      "properties": {"i": {"$ref": "#/$defs/Inner"}}, "required": ["i"]}  # fmt: skip
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    tools = [tool("one", INNER), tool("two", INNER | {"properties": {"x": {"enum": [8]}}})]
    for seed in range(4):
        given = {"tools": tools, "tool_choice": form, "max_tokens": 60, "seed": seed}
        (call,) = chat(client, temperature=2, **given).choices[0].message.tool_calls
        wanted = {"one": 7, "two": 8}[call.function.name]
        assert json.loads(call.function.arguments) == {"i": {"x": wanted}}


def test_a_tool_without_parameters_has_no_arguments(client):
    tool = {"type": "function", "function": {"name": "now"}}
    said = chat(client, tools=[tool], tool_choice="required", max_tokens=60).choices[0]
    assert said.finish_reason == "tool_calls"
    assert said.message.tool_calls[0].function.arguments == "{}"


@pytest.mark.parametrize("stream", [True, False])
def test_a_schema_that_leads_nowhere_is_refused_when_that_shows(client, stream):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}
    with pytest.raises(openai.BadRequestError, match="response_format leads to a place"):
        list(chat(client, response_format=form, stream=stream))


def test_log_probabilities_of_parts_of_characters_are_told_apart(client):
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": [WORD]}}}
    given = {"logprobs": 5, "max_tokens": 60, "extra_body": {"response_format": form}}
    (whole,) = complete(client, **given).choices
    streamed = [each for part in complete(client, stream=True, **given) for each in part.choices]
    parts = [each.logprobs for each in streamed if each.logprobs]
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        told = [each for part in parts for each in getattr(part, name)]
        assert told == getattr(whole.logprobs, name)
    assert {len(each) for each in whole.logprobs.top_logprobs} <= {5, 6}
    raw = b""
    for token, offset in zip(whole.logprobs.tokens, whole.logprobs.text_offset, strict=True):
        if offset < len(whole.text):
            begins = len(raw.decode("utf-8", "ignore"))
            assert offset == begins
        name = token.removeprefix("bytes:")
        raw += bytes.fromhex(name.replace("\\x", "")) if name != token else token.encode()


WORD = "ü€😀 naïve ü"


@pytest.mark.cases(2)
@pytest.mark.parametrize("stop", [None, "€😀", "😀 na", "ïv", "ü€😀 naïve ü"])
def test_characters_of_many_tokens_are_whole_in_streams_also_where_a_stop_string_ends_them(
    client, stop
):
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": [WORD]}}}
    given = {"response_format": form, "max_tokens": 60, "logprobs": True, "top_logprobs": 2}
    given |= {"stop": [stop]} if stop else {}
    said = json.dumps(WORD, ensure_ascii=False).partition(stop or "nothing")[0]
    texts, tokens = ["", ""], [b"", b""]
    for chunk in chat(client, stream=True, n=2, **given):
        for each in chunk.choices:
            assert "\ufffd" not in (each.delta.content or "")
            texts[each.index] += each.delta.content or ""
            told = each.logprobs.content if each.logprobs else ()
            tokens[each.index] += b"".join(bytes(entry.bytes) for entry in told)
    whole = chat(client, **given).choices[0]
    assert texts == [said] * 2 == [whole.message.content] * 2
    assert tokens[0] == b"".join(bytes(each.bytes) for each in whole.logprobs.content)
    assert tokens[0].decode().startswith(said + (stop or ""))


def test_several_choices_stream_their_tool_calls_with_log_probabilities_and_usage(client):
    given = {"tools": [ADD], "tool_choice": "required", "max_tokens": 60, "n": 3, "logprobs": True}
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **given))
    choices = [each for chunk in chunks for each in chunk.choices]
    calls = [each for each in choices if each.delta.tool_calls]
    assert sorted(each.index for each in calls) == [0, 1, 2]
    ends = [each for each in choices if each.finish_reason]
    assert sorted((each.index, each.finish_reason) for each in ends) == [
        (index, "tool_calls") for index in range(3)
    ]
    told = sum(len(each.logprobs.content) for each in choices if each.logprobs)
    assert told == chunks[-1].usage.completion_tokens
    assert len({each.delta.tool_calls[0].id for each in calls}) == 3


BAD = [
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {}, 400, "messages"),
    ("/v1/chat/completions", {"prompt": TEXT}, 400, "messages"),
    ("/v1/completions", {"messages": TALK}, 400, "prompt"),
    ("/v1/chat/completions", {"messages": TALK, "tool_choice": "required"}, 400, "tool_choice"),
    ("/tokenize", {"prompt": [TEXT, TEXT]}, 400, "prompt"),
    ("/tokenize", {"prompt": TEXT, "messages": TALK}, 400, "prompt"),
    ("/v1/chat/completions", {"messages": TALK, "chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs"),
    ("/v1/chat/completions", {"messages": TALK, "temperature": -1}, 400, "temperature"),
    ("/v1/chat/completions", {"messages": TALK, "temperature": 1e400}, 400, "temperature"),
    ("/v1/chat/completions", {"messages": TALK, "top_p": 0}, 400, "top_p"),
    ("/v1/chat/completions", {"messages": TALK, "max_tokens": 0}, 400, "max_tokens"),
    ("/v1/chat/completions", {"messages": TALK, "max_tokens": 10**6}, 400, "messages"),
    ("/v1/chat/completions", {"messages": TALK, "model": "gpt-4"}, 404, "model"),
    ("/v1/chat/completions", {"messages": TALK, "priority": 101}, 400, "priority"),
    ("/v1/chat/completions", {"messages": TALK, "reuse": "session"}, 400, None),
    ("/v1/chat/completions", {"messages": TALK, "stop": [""]}, 400, "stop"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 9000}]}, 400, "messages"),
    ("/v1/chat/completions", {"messages": TALK, "stop": ["a"] * 65}, 400, "stop"),
    ("/v1/chat/completions", {"messages": TALK, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ("/v1/completions", {"prompt": TEXT, "logprobs": 21}, 400, "logprobs"),
    ("/v1/completions", {"prompt": [TEXT] * 20, "n": 20}, 400, "n"),
    ("/tokenize", {"prompt": TEXT, "model": "gpt-4"}, 404, "model"),
    ("/v1/completions", {"prompt": ""}, 400, None),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": [[], [1]]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, 400, None),
    ("/v1/completions", {"prompt": [10**6]}, 400, None),
    ("/v1/completions", {"prompt": [2**70]}, 400, None),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 1e9}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"9999": 1}}, 400, None),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [2**40]}, 400, None),
    ("/v1/completions", {"prompt": "a", "logprobs": 10**9}, 400, None),
    ("/v1/completions", {"prompt": "a", "seed": 2**65}, 400, None),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/detokenize", {"tokens": [9999]}, 400, "tokens"),
    ("/detokenize", {"tokens": [1], "model": "gpt-0"}, 404, "model"),
    ("/tokenize", {}, 400, "prompt"),
    ("/v1/none", {}, 404, None),
    ("/v1/models", {}, 405, None),
]  # fmt: skip


@pytest.mark.cases(18)
@pytest.mark.parametrize(("path", "document", "status", "param"), BAD)
def test_an_invalid_request_is_answered_with_an_error_object(server, path, document, status, param):
    answer = server.post(path, content=json.dumps(document).replace("Infinity", "1e400"))
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"]
    assert "Traceback" not in answer.text
    assert param is None or error["param"] == param


@pytest.mark.parametrize("body", [b"{", b"", b"[1]", b"\xff", b'{"messages": ' + b"[" * 50_000])
def test_a_body_that_is_no_json_is_refused(server, body):
    answer = server.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_the_clients_own_errors_are_raised(client):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(client, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.completions.create(model="gpt-4", prompt="a")


def test_the_operators_routes_explain_pin_and_evict(server, client):
    prompt = "The operator asks about this prompt, which is long enough for some blocks of tokens."
    complete(client, prompt, max_tokens=2)
    told = server.post("/v1/cache/explain", {"prompt": prompt}).json()
    assert 0 < told["cached_tokens"] < told["num_tokens"]
    assert told["segments"][0] == {"start": 0, "stop": 80, "cached": True, "why": "5 shared blocks"}
    assert (
        server.post("/v1/cache/explain", {"prompt": prompt, "cache_salt": "x"}).json()[
            "cached_tokens"
        ]
        == 0
    )
    pin = server.post("/v1/cache/pin", {"prompt": prompt, "ttl_s": 60}).json()
    assert pin["num_tokens"] == 80
    assert pin["missing_tokens"] < 16
    pools = server.get("/v1/cache").json()["groups"]
    assert sum(pool["pinned"] for pool in pools) >= 5
    nothing = server.post("/v1/cache/pin", {"prompt": "never sent before " * 9, "ttl_s": 60}).json()
    assert nothing["num_tokens"] == 0 < nothing["missing_tokens"]
    plain_http.delete(f"{server.url}/v1/cache/pins/{nothing['id']}")
    assert server.manager.num_active == 5
    assert server.post("/v1/cache/evict", {"prompt": prompt}).json()["evicted_blocks"] == 0
    assert [each["id"] for each in server.get("/v1/cache/pins").json()["data"]] == [pin["id"]]

    assert plain_http.delete(f"{server.url}/v1/cache/pins/{pin['id']}").status_code == 200
    assert plain_http.delete(f"{server.url}/v1/cache/pins/{pin['id']}").status_code == 404
    assert server.get("/v1/cache/pins").json()["data"] == []
    assert server.post("/v1/cache/evict", {"prompt": prompt}).json()["evicted_blocks"] >= 5
    assert server.post("/v1/cache/explain", {"prompt": prompt}).json()["cached_tokens"] == 0
    server.quiet()


def test_a_pin_made_while_the_pins_are_listed_is_not_lost():
    counts = {"num_tokens": 16, "missing_tokens": 0}
    made, over = (SimpleNamespace(counts=counts, is_held=held) for held in (True, False))

    async def call(function):
        answer = function(None)
        pins.add(made)
        return answer

    running = SimpleNamespace(
        call=call, engine=SimpleNamespace(manager=CacheManager(8, 4), tiers=None)
    )
    pins = ServerPins({})
    operator = Operator(SimpleNamespace(running=running, log=RequestLog(), model="tiny", pins=pins))
    pins.add(over)
    asyncio.run(operator.pins(None, None))
    assert asyncio.run(operator.pins(None, None)) == {"data": [{"id": 2} | counts]}


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/v1/cache/pin", {"prompt": "a"}),
        ("/v1/cache/pin", {"prompt": "a", "ttl_s": 0}),
        ("/v1/cache/pin", {"prompt": "a", "ttl_s": -1}),
        ("/v1/cache/evict", {}),
        ("/v1/cache/evict", {"all": True, "num_blocks": 2}),
        ("/v1/cache/evict", {"num_blocks": 0}),
        ("/v1/cache/explain", {"prompt": ""}),
    ],
)
def test_invalid_requests_of_an_operator_are_refused(server, path, document):
    answer = server.post(path, document)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_the_operators_routes_answer_what_if_state_and_metrics(server, client):
    for _ in range(2):
        complete(client, "What the page shows as hot is what more than one request found.")
    points = server.get("/v1/cache/what-if?memory=2,4").json()["points"]
    assert [each["factor"] for each in points] == [2, 4]
    assert server.get("/v1/cache/what-if?memory=much").status_code == 400
    state = server.get("/v1/cache").json()
    (group,) = state["groups"]
    assert group["free"] + group["active"] + group["cached"] == group["num_blocks"]
    assert state["stats"]["num_requests"] > 0
    assert all(each["reason"] in ("length", "stop") for each in state["recent"][:2])
    assert state["recent"][0]["cached_tokens"] > 0 == state["recent"][1]["cached_tokens"]
    assert state["what_if"]["points"][1] == {"factor": 1, "hit_rate": state["stats"]["hit_rate"]}
    assert TEXT not in json.dumps(state)
    newest = state["samples"][-1]["at"] if state["samples"] else 0
    assert all(
        each["at"] > newest for each in server.get(f"/v1/cache?since={newest}").json()["samples"]
    )
    assert server.get("/v1/cache?since=soon").status_code == 400
    scopes = server.get("/v1/cache/tree").json()["scopes"]
    assert any(each["uses"] for scope in scopes for each in scope["children"])
    figures = server.get("/metrics").text
    for name in (
        "quire_hit_tokens_total",
        "quire_ttft_seconds_count",
        "quire_generation_tokens_total",
    ):
        assert f"\n{name}" in figures
    assert 'vllm:num_requests_running{engine="0",model_name="quire-tiny"} 0.0' in figures
    page = server.get("/")
    assert "<title>quire</title>" in page.text
    assert "{{" not in page.text
    for words in (
        "Hit rate",
        "cached tokens",
        "Misses by reason",
        "Tokens by tenant",
        "Prefix tree",
    ):
        assert words in page.text
    assert "http" not in page.text.replace("http://www.w3.org/2000/svg", "")
