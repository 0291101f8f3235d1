"""Scores of prompts over HTTP: echo, `max_tokens: 0` and `prompt_logprobs`, equal on hits and misses."""

import json

import pytest
import torch
from serve_help import fixtures, tiny

from quire.serve.completions import CompletionReply

server, nothing_stays = fixtures(max_step_tokens=80)

PROMPT = (
    "A list keeps the order of what was put into it, and a \N{SNOWMAN} dict maps keys to values."
)


def complete(server, prompt=PROMPT, **more):
    answer = server.post("/v1/completions", {"prompt": prompt, "temperature": 0} | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def right_scores(ids):
    with torch.inference_mode():
        scores = tiny()[0](torch.tensor([ids])).logits[0].log_softmax(-1)
    return scores[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def check_offsets(choice):
    """Check that the text at each token's offset is what the token says."""
    text, told = choice["text"], choice["logprobs"]
    ends = [*told["text_offset"][1:], len(text)]
    for token, start, end in zip(told["tokens"], told["text_offset"], ends, strict=True):
        if not token.startswith("bytes:") and start < end:
            assert text[start:end] == token


def streamed(server, **asked):
    """The text and the log-probabilities of a stream's only choice, put together."""
    text, told = "", {}
    answer = server.post("/v1/completions", {"stream": True, "temperature": 0} | asked)
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            text += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                told.setdefault(name, []).extend(values)
    return text, told


def test_a_prompt_scored_alone_is_echoed_with_the_models_log_probabilities(server):
    ids = tiny()[1](PROMPT)["input_ids"]
    asked = {"echo": True, "max_tokens": 0, "logprobs": 2}
    cold = complete(server, **asked)
    (choice,) = cold["choices"]
    told = choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert cold["usage"]["completion_tokens"] == 0
    assert len(told["tokens"]) == len(ids)
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    assert told["token_logprobs"][1:] == pytest.approx(right_scores(ids), abs=1e-4)
    assert {len(each) for each in told["top_logprobs"][1:]} <= {2, 3}
    check_offsets(choice)
    again = complete(server, **asked)
    warm = again["choices"][0]["logprobs"]["token_logprobs"]
    assert warm[1:] == pytest.approx(told["token_logprobs"][1:], abs=1e-4)
    assert complete(server)["usage"]["prompt_tokens_details"]["cached_tokens"] > len(ids) - 17


@pytest.mark.parametrize("form", ["text", "ids"])
def test_an_echoed_prompt_stands_before_each_answer(server, form):
    ids = tiny()[1](PROMPT)["input_ids"]
    prompt = PROMPT if form == "text" else ids
    asked = {"max_tokens": 5, "n": 2, "temperature": 1, "seed": 4, "logprobs": 0}
    plain, echoed = (complete(server, prompt, **asked, echo=each) for each in (False, True))
    for one, other in zip(plain["choices"], echoed["choices"], strict=True):
        assert other["text"] == PROMPT + one["text"]
        told, scores = one["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"]
        assert scores[1 : len(ids)] == pytest.approx(right_scores(ids), abs=1e-4)
        assert scores[len(ids) :] == pytest.approx(told, abs=1e-4)
        check_offsets(other)
    assert plain["usage"]["completion_tokens"] == echoed["usage"]["completion_tokens"]


def test_each_of_several_prompts_is_echoed(server):
    prompts = ["A list", "A tuple is", "A dict maps"]
    said = complete(server, prompts, max_tokens=2, echo=True)["choices"]
    for prompt, choice in zip(prompts, said, strict=True):
        assert choice["text"].startswith(prompt)
        assert choice["logprobs"] is None
    only = complete(server, prompts, max_tokens=0, echo=True)["choices"]
    assert [choice["text"] for choice in only] == prompts


def test_a_stream_begins_with_the_echoed_prompt(server):
    asked = {"prompt": PROMPT, "max_tokens": 6, "echo": True, "logprobs": 1}
    (choice,) = complete(server, **asked)["choices"]
    text, told = streamed(server, **asked)
    assert text == choice["text"]
    for name in ("tokens", "text_offset"):
        assert told[name] == choice["logprobs"][name]
    scores = choice["logprobs"]["token_logprobs"]
    assert told["token_logprobs"][1:] == pytest.approx(scores[1:], abs=1e-4)


def test_offsets_pass_over_tokens_that_the_text_does_not_show(server):
    special = tiny()[1].all_special_ids[0]
    ids = [special, *tiny()[1]("A list")["input_ids"]]
    for shows in (False, True):
        asked = {"max_tokens": 0, "echo": True, "logprobs": 0, "skip_special_tokens": not shows}
        (choice,) = complete(server, ids, **asked)["choices"]
        assert (choice["text"] == "A list") != shows
        check_offsets(choice)
        assert choice["logprobs"]["text_offset"][1] == (len(choice["text"]) - 6)


def test_prompt_logprobs_have_vllms_shape(server):
    ids = tiny()[1](PROMPT)["input_ids"]
    said = complete(server, max_tokens=1, n=2, prompt_logprobs=1)
    for choice in said["choices"]:
        assert choice["logprobs"] is None
        first, *others = choice["prompt_logprobs"]
        assert first is None
        own = [told[str(token)] for token, told in zip(ids[1:], others, strict=True)]
        assert [each["logprob"] for each in own] == pytest.approx(right_scores(ids), abs=1e-4)
        assert all(1 in {each["rank"] for each in told.values()} for told in others)
        assert {len(told) for told in others} <= {1, 2}
        assert own[0]["decoded_token"] == tiny()[1].decode(ids[1])
    echoed = complete(server, max_tokens=1, prompt_logprobs=0, logprobs=3, echo=True)["choices"]
    assert {len(told) for told in echoed[0]["prompt_logprobs"][1:]} == {1}
    assert "prompt_logprobs" not in complete(server, max_tokens=1)["choices"][0]


def test_a_chats_prompt_is_scored_too(server):
    talk = [{"role": "user", "content": "What is a list?"}]
    asked = {"messages": talk, "max_tokens": 1, "prompt_logprobs": 0}
    said = server.post("/v1/chat/completions", asked).json()
    ids = tiny()[1].apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
    scores = [next(iter(told.values()))["logprob"] for told in said["prompt_logprobs"][1:]]
    assert scores == pytest.approx(right_scores(ids), abs=1e-4)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_scores_that_are_not_offered_are_refused_by_name(server, more, param):
    answer = server.post("/v1/completions", {"prompt": PROMPT} | more)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_token_that_cannot_be_has_vllms_number(server):
    import msgspec

    from quire.engines.loop.sampling import Logprob
    from quire.serve.protocol import CompletionRequest

    asked = msgspec.convert({"prompt": [5, 6], "prompt_logprobs": 0}, CompletionRequest)
    made = CompletionReply(asked, "tiny", tiny()[1])
    assert made._score(5, {5: Logprob(float("-inf"), 9)}, 0)["5"]["logprob"] == -9999.0
