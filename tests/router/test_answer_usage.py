"""The usage of answers: of OpenAI's and Anthropic's APIs, whole and streamed."""

import asyncio
import json

import pytest

from quire_router.usage import AnswerUsage

CHAT = {
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 6},
}
RESPONSE = {"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 6}}
TIMINGS = {"cache_n": 6, "prompt_n": 3, "prompt_ms": 43.4, "predicted_n": 4, "predicted_ms": 93.1}
META = {
    "id": "a",
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "cached_tokens": 6,
    "e2e_latency": 0.1,
}
MESSAGE = {"input_tokens": 2, "cache_read_input_tokens": 6, "cache_creation_input_tokens": 1}


def of_choice(index, num):
    """Return events of llama-server that count the tokens of a choice as they come."""
    at = {"finish_reason": None, "index": index}
    return [{"choices": [at], "timings": TIMINGS | {"predicted_n": each}} for each in range(1, num)]


def streamed(*documents, cut=None):
    lines = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in documents)
    lines += b"data: [DONE]\n\n"
    usage = AnswerUsage()

    async def pieces():
        for at in range(0, len(lines), cut or len(lines)):
            yield lines[at : at + (cut or len(lines))]

    async def main():
        return b"".join([piece async for piece in usage.reading(pieces())])

    assert asyncio.run(main()) == lines
    return usage


@pytest.mark.parametrize(
    "whole",
    [
        {"usage": CHAT},
        {"usage": RESPONSE},
        {"usage": MESSAGE | {"output_tokens": 4}},
        {"content": "a", "timings": TIMINGS},
        {"usage": CHAT, "timings": TIMINGS | {"predicted_n": 400}},
        {"text": "a", "output_ids": [5], "meta_info": META},
        [{"index": 0, "content": "a", "timings": TIMINGS}],
    ],
)
def test_a_whole_answer_tells_its_tokens(whole):
    usage = AnswerUsage()
    usage.read(json.dumps(whole, indent=1).encode())
    assert (usage.prompt, usage.cached, usage.completion) == (9, 6, 4)
    assert usage.tokens(10**6) == 13


@pytest.mark.parametrize(
    "events",
    [
        [{"usage": None}, {"choices": [], "usage": CHAT}],
        [{"type": "response.completed", "response": {"usage": RESPONSE}}],
        [
            {"type": "message_start", "message": {"usage": MESSAGE | {"output_tokens": 1}}},
            {"type": "message_delta", "usage": {"output_tokens": 4}},
        ],
        [{"choices": [{"finish_reason": "length"}], "timings": TIMINGS}],
        [{"timings": TIMINGS | {"predicted_n": at}} for at in range(1, 5)],
        [{"text": "a", "meta_info": META | {"completion_tokens": at}} for at in range(1, 5)],
        [*of_choice(1, 4), {"choices": [], "usage": CHAT, "timings": TIMINGS}],
    ],
)
def test_a_stream_tells_its_tokens(events):
    usage = streamed({"choices": [{"text": 'the "usage": {"prompt_tokens": 5}'}]}, *events)
    assert (usage.prompt, usage.cached, usage.completion) == (9, 6, 4)


SAID = [{"index": 1, "timings": TIMINGS | {"cache_n": 5}}, {"index": 0, "timings": TIMINGS}]
META_OF = [{"index": at, "meta_info": META | {"cached_tokens": 5 + at}} for at in (0, 1)]
LAST = [{"choices": [], "usage": CHAT, "timings": TIMINGS}] * 2


@pytest.mark.parametrize(
    ("answers", "prompt"),
    [
        (SAID, 17),  # llama-server's `/completion`
        ([each | {"choices": [{"index": at}]} for at, each in enumerate(SAID)], 17),
        ([*of_choice(1, 4), *of_choice(0, 3), *SAID], 17),
        (META_OF, 18),  # SGLang's `/generate`
        ([META_OF[0] | {"meta_info": META}, *META_OF], 18),
    ],
)
def test_tokens_of_several_prompts_are_added_up(answers, prompt):
    usage = streamed(*answers)
    assert (usage.prompt, usage.cached, usage.completion) == (prompt, 11, 8)


@pytest.mark.parametrize(("answers", "prompt"), [(SAID, 17), (META_OF, 18)])
def test_tokens_of_a_list_of_answers_are_added_up(answers, prompt):
    usage = AnswerUsage()
    usage.read(json.dumps([each | {"index": None} for each in answers]).encode())
    assert (usage.prompt, usage.cached, usage.completion) == (prompt, 11, 8)


@pytest.mark.parametrize("events", [LAST, [*of_choice(1, 4), LAST[0], *of_choice(0, 3), LAST[1]]])
def test_choices_whose_last_events_do_not_name_them_are_added_up(events):
    usage = streamed(*events)
    assert (usage.prompt, usage.cached, usage.completion) == (18, 12, 8)


def test_an_answer_that_counts_a_prompt_alone_has_generated_nothing():
    usage = AnswerUsage()
    usage.read(json.dumps({"usage": {"prompt_tokens": 8}, "data": "1.5," * 2000}).encode())
    assert usage.tokens(400) == 8


def test_tokens_that_no_server_tells_are_estimated():
    usage = streamed({"choices": []}, {"choices": []})
    assert (usage.prompt, usage.tokens(400)) == (None, 103)
    usage = AnswerUsage()
    assert usage.tokens(400) == 0
    for broken in (
        b'{"usage": {',
        b'{"usage": {"prompt_tokens": "x"}}',
        b"\xff" * 80,
        b'{"usage": []}',
        b'{"timings": {}}',
        b'{"timings": {"predicted_n": 7}}',
        b'{"timings": {"send": 1.5, "wait": 20}}',
    ):
        usage = AnswerUsage()
        usage.read(broken)
        assert usage.tokens(400) == 100 + len(broken) // 4
