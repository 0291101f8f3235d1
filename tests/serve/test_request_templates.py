"""Chat templates of requests: refused unless they are trusted, and bounded in time and memory where they are."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import openai
import pytest
from serve_help import fixtures, running, tiny

from quire.chat import Conversation, own_template
from quire.chat.reader import PromptReader
from quire.errors import ConfigError

server, nothing_stays = fixtures()

SAID = [{"role": "user", "content": "What is a list?"}]
OWN = "{% for each in messages %}[{{ each.role }}: {{ each.content }}]{% endfor %}{{ mood }}{% if add_generation_prompt %}>{% endif %}"
ENDLESS = "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def client(server):
    server.service.reader.trust_templates()
    with pytest.MonkeyPatch.context() as changing:
        changing.setattr(own_template, "MAX_S", 20)
        yield server.client()


def chat(client, template, messages=SAID, **given):
    extra = {"chat_template": template, "return_token_ids": True, **given.pop("extra", {})}
    options = {"max_tokens": 3, "temperature": 0, "extra_body": extra, **given}
    return client.chat.completions.create(model="quire-tiny", messages=messages, **options)


def test_a_template_is_refused_by_name_unless_templates_are_trusted():
    asks = {
        "/v1/chat/completions": {"messages": SAID},
        "/tokenize": {"messages": SAID},
        "/v1/responses": {"input": "a"},
        "/v1/cache/explain": {"messages": SAID},
    }
    with running() as made:
        for path, asked in asks.items():
            answer = made.post(path, asked | {"chat_template": OWN})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "chat_template"), path
            assert "--trust-request-chat-template" in error["message"]
            assert made.post(path, asked | {"chat_template": "", "max_tokens": None}).status_code == 200  # fmt: skip
        made.quiet()


def test_a_prompt_is_laid_out_by_the_request_s_template(server, client):
    tokenizer = tiny()[1]
    said = chat(client, OWN, extra={"chat_template_kwargs": {"mood": "é"}})
    assert tokenizer.decode(said.prompt_token_ids) == "[user: What is a list?]é>"
    asked = {"messages": SAID, "chat_template": OWN, "add_generation_prompt": False}
    counted = server.post("/tokenize", asked).json()
    assert tokenizer.decode(counted["tokens"]) == "[user: What is a list?]"
    explained = server.post("/v1/cache/explain", {"messages": SAID, "chat_template": OWN}).json()
    assert explained["num_tokens"] == counted["count"] + len(tokenizer(">", add_special_tokens=False)["input_ids"])  # fmt: skip
    model_s = client.chat.completions.create(model="quire-tiny", messages=SAID, max_tokens=1)
    wanted = tokenizer.apply_chat_template(SAID, add_generation_prompt=True)["input_ids"]
    assert model_s.usage.prompt_tokens == len(wanted)


def test_the_model_s_own_template_makes_the_same_prompt_in_the_process(client):
    tools = [{"type": "function", "function": {"name": "now", "description": "é", "parameters": {"type": "object", "properties": {}}}}]  # fmt: skip
    for given in (
        {},
        {"tools": tools},
        {"tools": tools, "tool_choice": "required", "max_tokens": 40},
        {"extra": {"continue_final_message": True, "add_generation_prompt": False}},
        {"extra": {"documents": ["one text", "another"]}},
    ):
        one = chat(client, tiny()[1].chat_template, **given)
        other = chat(client, None, **given)
        assert one.prompt_token_ids == other.prompt_token_ids
        assert one.choices[0].token_ids == other.choices[0].token_ids


BAD = [
    ("{% for a in b %}\n{{ oops", "has a syntax error in line 2"),
    ("{{ raise_exception('no systems here') }}", "no systems here"),
    ("{{ messages.nothing.more }}", "refuses this conversation"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ '\\ud800' }}", "surrogates"),
    ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
    ("{{ 'a' * 10**6 }}", "more than 8192 tokens"),
]  # fmt: skip
ENDING = [
    ENDLESS,
    "{{ 7 ** (10 ** 9) }}",  # which no signal interrupts
    "{% set a = namespace(x='aaaaaaaa') %}{% for b in range(60) %}{% set a.x = a.x ~ a.x %}{% endfor %}",
]


@pytest.mark.parametrize(("template", "said"), BAD)
def test_a_template_that_cannot_be_used_is_refused_and_the_next_one_is_laid_out(
    server, client, template, said
):
    with pytest.raises(openai.BadRequestError) as told:
        chat(client, template)
    assert said in told.value.message
    assert told.value.body["param"] == ("messages" if "10**6" in template else "chat_template")
    assert chat(client, OWN).choices
    assert server.service.num_inflight == 0


@pytest.mark.ci
@pytest.mark.parametrize("template", ENDING)
def test_a_template_that_goes_on_is_ended_and_the_next_one_is_laid_out(
    client, monkeypatch, template
):
    monkeypatch.setattr(own_template, "MAX_S", 1.0)
    with pytest.raises(openai.BadRequestError, match="chat_template takes more than 1 s, or"):
        chat(client, template)
    monkeypatch.undo()
    assert chat(client, OWN).choices


def test_a_text_that_is_empty_or_a_variable_of_the_tokenizer_s_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="prompt is empty"):
        chat(client, "{{ '' }}")
    with pytest.raises(openai.BadRequestError, match="tokenize is not for the template"):
        chat(client, OWN, extra={"chat_template_kwargs": {"tokenize": True}})
    with pytest.raises(openai.BadRequestError, match="chat_template is not for the template"):
        chat(client, None, extra={"chat_template_kwargs": {"chat_template": OWN}})
    with pytest.raises(openai.BadRequestError, match="chat_template is not offered here"):
        client.completions.create(model="quire-tiny", prompt="a", extra_body={"chat_template": OWN})


def test_other_prompts_are_read_while_a_template_takes_its_time(monkeypatch):
    monkeypatch.setattr(own_template, "MAX_S", 0.1)
    end, is_read = own_template._end, threading.Event()
    monkeypatch.setattr(own_template, "_end", lambda running: (is_read.wait(30), end(running)))
    reader = PromptReader(tiny()[1], 4096)
    reader.trust_templates()

    async def asked():
        slow = asyncio.ensure_future(reader.ids(talk(ENDLESS)))
        await asyncio.sleep(0)
        await reader.ids(talk(None))
        assert not slow.done()
        is_read.set()
        with pytest.raises(ConfigError, match="takes more than"):
            await slow

    asyncio.run(asked())


def talk(template):
    return msgspec.convert({"messages": SAID, "chat_template": template}, Conversation)


def test_many_requests_with_templates_are_laid_out_one_after_another(client):
    templates = [f"{OWN}{at}" for at in range(12)]
    with ThreadPoolExecutor(6) as threads:
        made = [*threads.map(lambda each: chat(client, each), templates)]
    decoded = [tiny()[1].decode(each.prompt_token_ids) for each in made]
    assert decoded == [f"[user: What is a list?]>{at}" for at in range(12)]
