"""Outputs of an engine as OpenAI's answers."""

import json
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from quire import demo_model
from quire.chat.tokens import token_bytes
from quire.engines.loop import RequestMetrics
from quire.serve.completions import CompletionReply
from quire.serve.protocol import ChatRequest, CompletionRequest
from quire.serve.replies import AnswerMarks
from quire.web.clients import DONE

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model())


def output(text, *, reason=None, logprobs=None):
    ids = list(text.encode())
    return SimpleNamespace(
        text=text, token_ids=ids, num_tokens=len(ids), logprobs=logprobs, finish_reason=reason
    )


def data(event):
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return json.loads(event[6:])


def each_of(events):
    return [data(b"data: " + each) for each in events.split(b"data: ")[1:]]


def reply(tokenizer, *, chat=True, top=None, tools=None, usage=False, thinks=None):
    asked = {"stream": True, "stream_options": {"include_usage": usage}}
    if chat:
        asked |= {"messages": [], "logprobs": top is not None, "top_logprobs": top}
    else:
        asked |= {"prompt": "a", "logprobs": top}
    request = msgspec.convert(asked, ChatRequest if chat else CompletionRequest)
    made = CompletionReply(request, "tiny", tokenizer, marks=AnswerMarks(tools, thinks))
    return made, made.choices[0]


def streamed(made, choice, outputs):
    events = []
    for each in outputs:
        choice.take(each)
        events += [event["choices"][0] for event in each_of(made.chunk(choice))]
    return events


def test_a_whole_chat_answer(tokenizer):
    made, choice = reply(tokenizer)
    made.prompt_tokens, made.cached_tokens = 10, 8
    choice.take(output("Hello", reason="stop"))
    said = made.whole()
    assert said["object"] == "chat.completion"
    assert said["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "logprobs": None, "finish_reason": "stop"}
    ]  # fmt: skip
    assert said["usage"] == {
        "prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 8},
    }  # fmt: skip


def test_a_stream_has_each_piece_once(tokenizer):
    made, choice = reply(tokenizer)
    (first,) = map(data, made.opening())
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    outputs = [output("He"), output("He"), output("Hello"), output("Hello", reason="length")]
    events = streamed(made, choice, outputs)
    assert [each["delta"] for each in events] == [{"content": "He"}, {"content": "llo"}, {}]
    assert [each["finish_reason"] for each in events] == [None, None, "length"]
    assert made.closing() == [DONE]


def test_a_stream_with_its_usage_says_in_all_other_events_that_they_have_none(tokenizer):
    made, choice = reply(tokenizer, usage=True)
    said = b"".join(made.opening())
    choice.take(output("Hello", reason="length"))
    said += made.chunk(choice)
    assert [each["usage"] for each in each_of(said)] == [None, None, None]
    last, done = made.closing()
    assert data(last)["choices"] == []
    assert data(last)["usage"]["completion_tokens"] == 5
    assert done == DONE


def test_completions_have_their_own_shape(tokenizer):
    made, choice = reply(tokenizer, chat=False)
    assert made.opening() == []
    events = streamed(made, choice, [output("a"), output("ab", reason="stop")])
    assert [each["text"] for each in events] == ["a", "b"]
    made, choice = reply(tokenizer, chat=False)
    choice.take(output("ab", reason="stop"))
    assert made.whole()["choices"][0]["text"] == "ab"
    assert made.whole()["object"] == "text_completion"


def test_tool_calls_come_whole_and_no_part_of_them_as_text(tokenizer):
    text = "So: " + CALL
    made, choice = reply(tokenizer, tools="hermes")
    outputs = [output(text[:cut]) for cut in range(1, len(text))] + [output(text, reason="stop")]
    events = streamed(made, choice, outputs)
    said = "".join(each["delta"].get("content", "") for each in events)
    assert said.rstrip() == "So:"
    (call,) = events[-2]["delta"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (call["index"], call["type"]) == (0, "function")
    assert events[-1]["finish_reason"] == "tool_calls"


class Grown(NamedTuple):
    """The growth of a choice: its text, characters per step, first step, and finish reason."""

    text: str
    since: int
    speed: int
    reason: str

    def at(self, step, index):
        length = max(step - self.since, 0) * self.speed
        made = output(self.text[:length], reason=self.reason if length >= len(self.text) else None)
        made.index = index
        return made


GROWN = st.builds(
    Grown,
    st.sampled_from(["H", "Hello, world", "So: " + CALL, CALL + "\n" + CALL, "a <tool"]),
    st.integers(0, 3),
    st.sampled_from([1, 3, 30, 200]),
    st.sampled_from(["stop", "length"]),
)


@given(
    requests=st.integers(1, 3).flatmap(
        lambda n: st.lists(st.lists(GROWN, min_size=n, max_size=n), min_size=1, max_size=2)
    ),
    chat=st.booleans(),
    tools=st.sampled_from([None, "hermes"]),
    echo=st.booleans(),
)
def test_choices_that_end_one_after_another_are_told_once(tokenizer, requests, chat, tools, echo):
    prompts = ["a", "It was"][: len(requests)]
    asked = {"messages": []} if chat else {"prompt": prompts, "echo": echo}
    asked["n"] = len(requests[0])
    asked = msgspec.convert(asked, ChatRequest if chat else CompletionRequest)
    tools = tools if chat else None
    streamed, whole = (
        CompletionReply(asked, "tiny", tokenizer, len(requests), AnswerMarks(tools))
        for _ in range(2)
    )
    events, step, running = [], 0, set(range(len(requests)))
    while running:
        step += 1
        for place in sorted(running):
            made = [choice.at(step, index) for index, choice in enumerate(requests[place])]
            news = SimpleNamespace(
                prompt_token_ids=[1],
                prompt_logprobs=None,
                num_cached_tokens=0,
                metrics=RequestMetrics(0.0),
                passages=None,
                outputs=made,
            )
            told = [streamed.chunk(choice) for choice in streamed.take(place, news)]
            events += [event["choices"][0] for event in each_of(b"".join(told))]
            if all(each.finish_reason for each in made):
                running.remove(place)
                assert len([*whole.take(place, news)]) == len(made)
    for right in whole.whole()["choices"]:
        told = [each for each in events if each["index"] == right["index"]]
        assert [each["finish_reason"] for each in told[:-1]] == [None] * (len(told) - 1)
        assert told[-1]["finish_reason"] == right["finish_reason"]
        if chat:
            assert told[-1]["delta"] == {}
        else:
            assert "".join(each["text"] for each in told) == right["text"]
            place, index = divmod(right["index"], asked.n)
            begun = prompts[place] if echo else ""
            assert right["text"] == begun + requests[place][index].text
            continue
        said, message = [each["delta"] for each in told], right["message"]
        calls = [call["function"] for each in said for call in each.get("tool_calls", ())]
        assert calls == [call["function"] for call in message.get("tool_calls", ())]
        text = "".join(each.get("content", "") for each in said)
        assert text.rstrip() == (message["content"] or "").rstrip()


def test_tool_calls_of_a_whole_answer(tokenizer):
    made, choice = reply(tokenizer, tools="hermes")
    choice.take(output(CALL, reason="stop"))
    (said,) = made.whole()["choices"]
    assert said["message"]["content"] is None
    assert said["message"]["tool_calls"][0]["function"]["name"] == "add"
    assert said["finish_reason"] == "tool_calls"


def test_text_held_back_for_a_tool_call_is_sent_if_it_is_none(tokenizer):
    made, choice = reply(tokenizer, tools="hermes")
    events = streamed(made, choice, [output("a <tool"), output("a <tool", reason="stop")])
    assert [each["delta"] for each in events] == [{"content": "a"}, {"content": " <tool"}, {}]


def test_log_probabilities_of_chats(tokenizer):
    made, choice = reply(tokenizer, top=1)
    a, b = ord("a"), ord("b")
    one, two = {a: -0.5, b: -0.9}, {b: SimpleNamespace(logprob=-2.0), a: -0.1}
    events = streamed(made, choice, [
        output("a", logprobs=[one]), output("ab", logprobs=[one, two], reason="stop")])  # fmt: skip
    (first,), (second,) = (each["logprobs"]["content"] for each in events[:-1])
    assert events[-1]["logprobs"] is None
    assert first == {
        "token": "a", "logprob": -0.5, "bytes": [a],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [a]}],
    }  # fmt: skip
    assert (second["token"], second["logprob"]) == ("b", -2.0)
    assert [each["token"] for each in second["top_logprobs"]] == ["a"]


def test_log_probabilities_of_completions(tokenizer):
    made, choice = reply(tokenizer, chat=False, top=2)
    a, b = ord("a"), ord("b")
    choice.take(output("ab", logprobs=[{a: -0.5, b: -0.9}, {b: -2.0}], reason="stop"))
    assert made.whole()["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"], "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"a": -0.5, "b": -0.9}, {"b": -2.0}], "text_offset": [0, 1],
    }  # fmt: skip


def test_the_bytes_of_a_part_of_a_character(tokenizer):
    ids = tokenizer("ü€", add_special_tokens=False)["input_ids"]
    assert b"".join(token_bytes(tokenizer, each) for each in ids) == "ü€".encode()
