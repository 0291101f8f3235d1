"""Logs that real clients wrote of real servers (`benchmarks/client_logs.py`): each is read exactly."""

import functools
from pathlib import Path

import pytest

import real_models
from quire import demo_model
from quire.cli.models import load_tokenizer
from quire_sim.caches import CacheOptions, ExactTokens, cache_of, predictions
from quire_sim.logs import open_log
from quire_sim.rendering import PromptRenderer

FOLDER = Path(__file__).parents[1] / "data" / "client_logs"
ROWS = {"openai": 8, "anthropic": 3, "litellm": 3, "otel": 6, "mitmproxy": 3}
FORMATS = {"otel": "otel", "server": "llama-server"}
WITHOUT_CHOICE = {("otel", 4), ("otel", 5)}
"""Spans that do not tell `tool_choice: none`, with which a server leaves the tools out."""

REAL = pytest.mark.system(real_models.SMOLLM2)
LOGS = [
    pytest.param(each.name, marks=[REAL, pytest.mark.slow] if each.name[0] == "l" else [])
    for each in sorted(FOLDER.iterdir())
    if "_server" not in each.name
]


def read(name):
    log = open_log(FOLDER / name)
    rows = list(log)
    assert not log.unread.total
    return log, rows


@functools.cache
def renderer_of(server):
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
    cache = cache_of("llama.cpp" if server == "llama" else server, options)
    told = [each for each in rows if (client, each.row) not in WITHOUT_CHOICE]
    if (server, client) == ("vllm", "anthropic"):  # the other client asked the same server before
        told = read(name.replace("anthropic", "openai"))[1] + told
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
