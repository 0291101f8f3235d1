"""Logs that real clients wrote of real servers (`benchmarks/client_logs.py`): each is read exactly."""

import functools
import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from log_help import lines

import real_models
from quire import demo_model
from quire.cli.models import load_tokenizer
from quire_sim.caches import CacheOptions, ExactTokens, cache_of, hits, predictions
from quire_sim.logs import open_log
from quire_sim.logs.calls import calls_of
from quire_sim.rendering import PromptRenderer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from made_agent import add_calls

FOLDER = Path(__file__).parents[1] / "data" / "client_logs"
ROWS = {
    "openai": 8,
    "anthropic": 3,
    "litellm": 3,
    "otel": 6,
    "mitmproxy": 3,
    "messages": 6,
    "chats": 5,
}
FORMATS = {"otel": "otel", "server": "llama-server"}
WITHOUT_CHOICE = {("otel", 4), ("otel", 5)}
"""Spans that do not tell `tool_choice: none`, with which a server leaves the tools out."""

REAL = pytest.mark.system(real_models.SMOLLM2)
LOGS = [
    pytest.param(each.name, marks=[REAL, pytest.mark.slow] if each.name[0] in "al" else [])
    for each in sorted(FOLDER.iterdir())
    if "_server" not in each.name
]


def read(name):
    log = open_log(FOLDER / name)
    rows = list(log)
    counts = {"a count of tokens, which has no answer": 1}
    assert log.unread.count == (counts if name == "agent_tap_messages.jsonl" else {})
    if name.startswith("agent"):  # two names of one model
        rows = [msgspec.structs.replace(each, model="m") for each in rows]
    return log, rows


@functools.cache
def renderer_of(server):
    if server == "agent":
        tokenizer = load_tokenizer(str(real_models.folder(real_models.SMOLLM2)))
        add_calls(tokenizer)
        return PromptRenderer(tokenizer)
    folder = real_models.folder(real_models.SMOLLM2) if server == "llama" else demo_model()
    return PromptRenderer(load_tokenizer(str(folder)), has_unused_tools=server == "vllm")


@pytest.mark.parametrize("name", LOGS)
def test_each_request_is_a_row_with_the_servers_tokens_and_hits(name):
    server, *_, client = name.partition(".")[0].split("_")
    log, rows = read(name)
    assert (log.format, len(rows)) == (FORMATS.get(client, "requests"), ROWS[client])
    assert all(each.answer is not None and each.duration_s for each in rows)
    assert all(1.7e9 < each.time_s < 2e9 for each in rows)
    prompts = ExactTokens(renderer_of(server))
    options = CacheOptions(100_000, 32 if server == "vllm" else None)
    cache = cache_of({"llama": "llama.cpp", "agent": "quire"}.get(server, server), options)
    told = [each for each in rows if (client, each.row) not in WITHOUT_CHOICE]
    before = {
        "vllm_anthropic": "vllm_openai",
        "vllm_tap_anthropic": "vllm_tap_openai",
        "agent_tap_chats": "agent_tap_messages",
    }
    if name.partition(".")[0] in before:  # the other client asked the same server before
        told = read(before[name.partition(".")[0]] + ".jsonl")[1] + told
    found = list(predictions(told, cache, prompts.prompt))
    assert [each.hit.prompt_tokens for each in found] == [e.usage.prompt_tokens for e in told]
    assert [each.hit.hit_tokens for each in found] == [each.told_hit_tokens for each in found]
    assert any(each.told_hit_tokens for each in found)


@pytest.mark.parametrize("server", ["quire", "vllm", "llama"])
def test_a_client_and_the_tap_before_the_server_tell_the_same(server):
    for client in ("openai", "anthropic"):
        one, other = (read(f"{server}_{by}{client}.jsonl")[1] for by in ("", "tap_"))
        for each, tapped in zip(one, other, strict=True):
            assert each.body == tapped.body
            assert (each.usage, each.answer) == (tapped.usage, tapped.answer)
            assert each.duration_s >= tapped.duration_s


def test_the_log_of_llama_server_tells_what_the_client_was_told():
    _, rows = read("llama_server.log")
    _, told = read("llama_openai.jsonl")
    assert [each.usage for each in rows] == [each.usage for each in told]


def test_the_log_of_vllm_has_the_prompts_of_all_clients():
    _, rows = read("vllm_server.log")
    told = [*read("vllm_openai.jsonl")[1], *read("vllm_anthropic.jsonl")[1]]
    counts = [len(renderer_of("vllm").ids(each)) for each in rows]
    assert counts == [each.usage.prompt_tokens for each in told]


LONG = {
    "command": "ls -la /srv/lighthouse && cat /srv/lighthouse/keeper.txt",
    "description": "Show the files",
}
QUESTION = {"role": "user", "content": "Which ships are late?"}
TEXT = json.dumps(LONG)
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "Bash", "arguments": TEXT}}
USE = {"type": "tool_use", "id": "c1", "name": "Bash", "input": LONG}


def answered(api):
    """Return a body, its whole answer, and the events of its stream."""
    if api == "chat":
        message = {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}
        head = CHAT_CALL | {"index": 0, "function": {"name": "Bash", "arguments": ""}}
        calls = [
            head,
            *(
                {"index": 0, "function": {"arguments": TEXT[at : at + 9]}}
                for at in range(0, len(TEXT), 9)
            ),
        ]
        events = [{"choices": [{"delta": {"tool_calls": [each]}}]} for each in calls]
        return {"model": "m", "messages": [QUESTION]}, {"choices": [{"message": message}]}, events
    if api == "messages":
        start = {"type": "content_block_start", "index": 1, "content_block": USE | {"input": {}}}
        parts = [
            {"type": "input_json_delta", "partial_json": TEXT[at : at + 9]}
            for at in range(0, len(TEXT), 9)
        ]
        events = [
            start,
            *({"type": "content_block_delta", "index": 1, "delta": each} for each in parts),
        ]
        return {"model": "m", "max_tokens": 9, "messages": [QUESTION]}, {"content": [USE]}, events
    call = {"type": "function_call", "call_id": "c1", "name": "Bash", "arguments": TEXT}
    events = [
        {"type": "response.output_item.done", "item": call},
        {"type": "response.completed", "response": {"output": [call]}},
    ]
    return {"model": "m", "input": [QUESTION]}, {"output": [call]}, events


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_the_calls_of_an_answer_are_read_whole_and_from_a_stream(api):
    _, whole, events = answered(api)
    stream = "".join(f"data: {json.dumps(each)}\n\n" for each in events)
    for answer in (whole, stream):
        ((name, arguments, number),) = calls_of(answer)
        assert (name, json.loads(arguments), number) == ("Bash", LONG, "c1")


def test_several_calls_keep_their_order_and_of_other_choices_none_is_read():
    calls = [CHAT_CALL | {"id": f"c{n}"} for n in range(3)]
    choices = [{"message": {"tool_calls": calls}}, {"message": {"tool_calls": calls}}]
    assert [each.id for each in calls_of({"choices": choices})] == ["c0", "c1", "c2"]
    deltas = [
        {"choices": [{"delta": {"tool_calls": [calls[n] | {"index": n}]}}]} for n in (1, 0, 2)
    ]
    stream = "".join(f"data: {json.dumps(each)}\n\n" for each in deltas)
    assert [each.id for each in calls_of(stream)] == ["c0", "c1", "c2"]


@pytest.mark.parametrize("answer", [None, "", 7, [], {}, "tool_use", {"choices": None}, {"choices": [{"message": None}]},
                                    {"content": "tool_use"}, 'data: {"tool_calls": 1, "delta": 3}\n'])  # fmt: skip
def test_an_answer_without_calls_has_none(answer):
    assert calls_of(answer) == ()


@REAL
@pytest.mark.slow
@pytest.mark.parametrize("api", ["chat", "messages"])
def test_the_tokens_of_a_call_are_found_by_the_prompt_with_its_result(tmp_path, api):
    body, answer, _ = answered(api)
    if api == "chat":
        result = {"role": "tool", "tool_call_id": "c1", "content": "None."}
        then = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}, result]
    else:
        result = {"type": "tool_result", "tool_use_id": "c1", "content": "None."}
        then = [
            QUESTION,
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [result]},
        ]
    path = lines(tmp_path / "log", [{"request": body, "response": answer | {"usage": {"input_tokens": 30, "output_tokens": 40}}},
                                    {"request": body | {"messages": then}}])  # fmt: skip
    first, second = map(ExactTokens(renderer_of("agent")).prompt, open_log(path))
    assert len(first.output) == 40
    whole = np.concatenate([first.tokens, first.output])
    assert (second.tokens[: len(whole)] == whole).all()
    found = list(hits(cache_of("quire"), [first, second]))
    assert found[1].hit_tokens >= len(whole) - 17 > len(first.tokens)
