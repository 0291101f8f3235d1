"""Reasoning apart from content, by the official client; quire-tiny's greedy answer has words for tags."""

import json

import anthropic
import openai
import pytest
from serve_help import command, fixtures, in_pieces

from quire.chat.reasoning import FORMATS, ReasoningFormat
from quire.errors import ConfigError
from quire.serve.service import Bounds, ServedModel
from quire.web.keys import ApiKeys

TALK = [{"role": "user", "content": "What is a list?"}]
ASKED = {"model": "quire-tiny", "messages": TALK, "temperature": 0}
TOOLS = [{"type": "function", "function": {"name": "now"}}]

server, nothing_stays = fixtures()


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def plain(client):
    return client.chat.completions.create(**ASKED, max_tokens=40).choices[0].message.content


@pytest.fixture
def tags(server, plain):
    """Reasoning that a word of the plain answer ends; the answer begins within it."""
    thought, closer, content = plain.partition("mutable")
    assert content.strip()
    server.service.reasoning = ReasoningFormat("<think>", closer, (), is_implied=True)
    yield thought, closer, content
    server.service.reasoning = None


def streamed(client, **given):
    stream = client.chat.completions.create(
        **ASKED, stream=True, stream_options={"include_usage": True}, **given
    )
    *chunks, last = stream
    return [chunk.choices[0] for chunk in chunks], last.usage


def test_a_message_has_its_reasoning_apart(client, plain, tags):
    thought, closer, content = tags
    answer = client.chat.completions.create(**ASKED, max_tokens=40)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == (thought, content)
    assert message.reasoning == message.reasoning_content
    details = answer.usage.completion_tokens_details
    assert details.reasoning_tokens == len((thought + closer).encode())
    assert answer.usage.completion_tokens == 40


def test_a_stream_has_reasoning_before_content(client, tags, monkeypatch):
    in_pieces(monkeypatch)
    thought, closer, content = tags
    choices, usage = streamed(client, max_tokens=40)
    deltas = [each.delta for each in choices]
    thoughts = [getattr(each, "reasoning_content", "") for each in deltas]
    texts = [each.content or "" for each in deltas]
    assert ("".join(thoughts), "".join(texts)) == (thought, content)
    assert len([*filter(None, thoughts)]) > 1
    last_thought = max(at for at, each in enumerate(thoughts) if each)
    assert not any(texts[:last_thought])  # the last one may come with the first content
    assert usage.completion_tokens_details.reasoning_tokens == len((thought + closer).encode())


def test_an_answer_cut_within_its_reasoning_has_no_content(client, tags):
    thought, closer, _ = tags
    most = len(thought.encode()) + len(closer) - 1
    (choice,) = client.chat.completions.create(**ASKED, max_tokens=most).choices
    assert choice.message.content is None
    assert choice.message.reasoning_content == thought + closer[:-1]
    assert choice.finish_reason == "length"
    choices, usage = streamed(client, max_tokens=most)
    assert choices[-1].finish_reason == "length"
    assert (
        "".join(getattr(each.delta, "reasoning", "") for each in choices) == thought + closer[:-1]
    )
    assert usage.completion_tokens_details.reasoning_tokens == most


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_left_out_if_a_request_says_so(client, tags, stream):
    thought, closer, content = tags
    more = {"max_tokens": 40, "extra_body": {"include_reasoning": False}}
    if stream:
        choices, usage = streamed(client, **more)
        messages = [each.delta for each in choices]
    else:
        answer = client.chat.completions.create(**ASKED, **more)
        messages, usage = [answer.choices[0].message], answer.usage
    assert "".join(each.content or "" for each in messages) == content
    assert not any(hasattr(each, "reasoning") for each in messages)
    assert usage.completion_tokens_details.reasoning_tokens == len((thought + closer).encode())


def test_each_of_several_answers_has_its_own_reasoning(client, tags):
    _, closer, _ = tags
    asked = ASKED | {"temperature": 1.2, "seed": 5, "n": 4, "max_tokens": 30}
    answer = client.chat.completions.create(**asked)
    assert len({choice.message.reasoning_content for choice in answer.choices}) == 4
    assert not any(closer in choice.message.reasoning_content for choice in answer.choices)
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens <= answer.usage.completion_tokens


def test_a_stop_text_ends_an_answer_in_its_reasoning_too(client, plain, tags):
    thought, *_ = tags
    (choice,) = client.chat.completions.create(**ASKED, max_tokens=40, stop=[thought[3:6]]).choices
    assert choice.message.reasoning_content == thought[:3]
    assert (choice.message.content, choice.finish_reason) == (None, "stop")


@pytest.mark.parametrize(
    ("more", "is_right"),
    [
        ({"guided_choice": ["yes", "no"]}, ["yes", "no"].__contains__),
        ({"guided_regex": "[0-9]{3}"}, str.isdigit),
        ({"response_format": {"type": "json_object"}}, json.loads),
        ({"guided_grammar": 'start: "a" "b"+'}, lambda text: text.startswith("ab")),
    ],
)
def test_a_form_begins_behind_the_reasoning(client, tags, more, is_right):
    thought, *_ = tags
    answer = client.chat.completions.create(**ASKED, max_tokens=200, extra_body=more)
    (choice,) = answer.choices
    assert choice.message.reasoning_content == thought
    assert choice.finish_reason == "length" or is_right(choice.message.content) in (True, {})


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_follows_the_reasoning(client, server, stream):
    server.service.reasoning = ReasoningFormat("<think>", " ", (), is_implied=True)
    more = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 120}
    if stream:
        choices, _ = streamed(client, **more)
        said = "".join(getattr(each.delta, "reasoning", "") for each in choices)
        (calls,) = filter(None, (each.delta.tool_calls for each in choices))
    else:
        (choice,) = client.chat.completions.create(**ASKED, **more).choices
        said, calls = choice.message.reasoning_content, choice.message.tool_calls
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    server.service.reasoning = None
    assert said
    assert " " not in said
    assert calls[0].function.name == "now"


def test_a_response_has_an_item_of_reasoning_that_the_next_one_reads(client, tags):
    thought, closer, content = tags
    asked = {"model": "quire-tiny", "input": TALK, "temperature": 0, "max_output_tokens": 40}
    made = client.responses.create(**asked)
    reasoning, message = made.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", thought)
    assert (message.type, made.output_text) == ("message", content)
    assert made.usage.output_tokens_details.reasoning_tokens == len(thought + closer)
    events = [*client.responses.create(**asked, stream=True)]
    told = [each.delta for each in events if each.type == "response.reasoning_text.delta"]
    assert "".join(told) == thought
    assert [each.type for each in events[-1].response.output] == ["reasoning", "message"]
    more = asked | {"input": "And a tuple?", "previous_response_id": made.id}
    items = client.responses.input_items.list(client.responses.create(**more).id, order="asc")
    assert [each.type for each in items] == ["message", "reasoning", "message", "message"]


def test_a_response_cut_within_its_reasoning_is_incomplete(client, tags):
    made = client.responses.create(
        model="quire-tiny", input=TALK, temperature=0, max_output_tokens=5
    )
    (reasoning,) = made.output
    assert (made.status, reasoning.type, reasoning.status) == (
        "incomplete",
        "reasoning",
        "incomplete",
    )


@pytest.mark.parametrize("kind", ["enabled", "adaptive", "disabled", None])
def test_a_message_has_a_block_of_thinking_if_it_is_asked_for(server, tags, kind):
    thought, _, content = tags
    asked = {"model": "quire-tiny", "messages": TALK, "max_tokens": 40}
    asked["extra_body"] = {"temperature": 0}
    if kind:
        asked["thinking"] = {"type": kind} | ({"budget_tokens": 1024} if kind == "enabled" else {})
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        blocks = client.messages.create(**asked).content
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message().content
        assert [each.model_dump() for each in streamed] == [each.model_dump() for each in blocks]
        assert blocks[-1].text == content
        if kind in ("disabled", None):
            assert len(blocks) == 1
            return
        assert (blocks[0].type, blocks[0].thinking) == ("thinking", thought)
        messages = [
            *TALK,
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": "A"},
        ]
        assert client.messages.create(**asked | {"messages": messages}).content


def test_a_prompt_that_closes_the_reasoning_has_an_answer_without(client, server, plain):
    server.service.reasoning = ReasoningFormat("<think>", "<assistant>", (), is_implied=True)
    answer = client.chat.completions.create(**ASKED, max_tokens=40)
    server.service.reasoning = None
    assert answer.choices[0].message.content == plain
    assert not hasattr(answer.choices[0].message, "reasoning")


def test_a_model_without_reasoning_says_nothing_of_it(client, server):
    assert server.service.reasoning is None
    answer = client.chat.completions.create(**ASKED, max_tokens=4)
    assert answer.usage.completion_tokens_details is None
    with pytest.raises(openai.BadRequestError, match="reasoning_effort is 'high'"):
        client.chat.completions.create(**ASKED, max_tokens=4, reasoning_effort="high")
    client.chat.completions.create(**ASKED, max_tokens=4, reasoning_effort="none")


def test_the_operator_names_a_format(server):
    def of(name):
        made = ServedModel(server.service.running, "m", ApiKeys(), Bounds())
        made.read_reasoning(name)
        return made.reasoning

    assert of("auto") is of("none") is None
    assert of("mistral") == FORMATS["mistral"]


def test_a_name_that_is_no_format_is_refused_before_anything_is_loaded():
    from quire.cli.serve import serve

    with pytest.raises(ConfigError, match=r"--reasoning-parser is one of auto.*got 'qwen'"):
        serve(model="nowhere", reasoning_parser="qwen")


@pytest.mark.ci
def test_a_template_that_opens_the_reasoning_has_it_apart(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text(
        "<bos>{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
    )
    form = {"guided_choice": ["yes", "no"], "max_tokens": 20}
    with (
        command("--chat-template", str(template)) as (_, told),
        openai.OpenAI(base_url=f"{told['url']}/v1", api_key="none") as client,
    ):
        (choice,) = client.chat.completions.create(**ASKED, extra_body=form).choices
    assert choice.message.content is None
    assert choice.message.reasoning_content
    assert choice.finish_reason == "length"
