"""The demo's conversations with a server: each prompt is asked twice, with what is cached and apart from all else."""

import sys
import time
import uuid
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple, Self, TypeAlias

import httpx
import openai

from quire.cli.chat import Messages, message
from quire.cli.server_process import HOST, ServerProcess

_TIMEOUT_S = 300
_MAX_TOKENS = 64
_STOPS = (". ", "\n")
"""Ends of a reply: a small model that goes on repeats itself."""

Call: TypeAlias = dict[str, Any]
"""One prompt and its reply: `before` without quire's reuse, `after` with it; times in ms."""


class DemoReply(NamedTuple):
    """A reply of the server, and what its prompt cost."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float


class DemoServer:
    """A `quire serve` of its own at `url`, until it is closed, and the client of OpenAI that asks it."""

    def __init__(self, words: Sequence[str]) -> None:
        command = [sys.executable, "-m", "quire", "serve", "--name", "demo", *words]
        self._server = ServerProcess(command, None)
        self.url = f"http://{HOST}:{self._server.port}"
        self._client: Any = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=_TIMEOUT_S
        )
        self._http = httpx.Client(base_url=self.url, timeout=_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._client.close()
        self._server.close()

    def warm_up(self) -> None:
        """Ask both ways once, so that no reply pays for first calls."""
        talk = [message("user", "The first call sets things up.")]
        for is_reusing in (True, False):
            self.ask(talk, is_reusing=is_reusing)

    def ask(self, talk: Messages, *, is_reusing: bool) -> DemoReply:
        """Return the likeliest reply; one without reuse finds nothing, and leaves nothing to be found."""
        more = {} if is_reusing else {"cache_salt": uuid.uuid4().hex, "reuse": "never"}
        usage: Any = None
        text, ttft_s = "", 0.0
        began_s = time.perf_counter()
        stream = self._client.chat.completions.create(
            model="demo", messages=talk, stream=True, stream_options={"include_usage": True}, temperature=0,
            max_tokens=_MAX_TOKENS, stop=_STOPS, extra_body={"include_stop_str_in_output": True} | more,
        )  # fmt: skip
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                if choice.delta.content:
                    ttft_s = ttft_s or time.perf_counter() - began_s
                    text += choice.delta.content
        total_s = time.perf_counter() - began_s
        counts = usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens
        return DemoReply(text.strip(), *counts, ttft_s or total_s, total_s)

    def state(self) -> dict[str, Any]:
        """Return the pool and the counters of the cache."""
        state = self._http.get("/v1/cache").raise_for_status().json()
        return {"pool": state["groups"][0], "stats": state["stats"]}


def call(label: str, turn: int, before: DemoReply, after: DemoReply, question: str) -> Call:
    """Return a prompt that was asked twice, as plain data."""
    return {
        "conversation": label,
        "turn": turn,
        "prompt_tokens": after.prompt_tokens,
        "cached_tokens": after.cached_tokens,
        "ttft_before_ms": before.ttft_s * 1e3,
        "ttft_after_ms": after.ttft_s * 1e3,
        "total_before_ms": before.total_s * 1e3,
        "total_after_ms": after.total_s * 1e3,
        "identical": before.text == after.text and not before.cached_tokens,
        "question": question,
        "reply": after.text,
        "speedup": before.ttft_s / after.ttft_s,
    }


def figures(turns: list[Call]) -> dict[str, Any]:
    """Return the sums of calls, and medians over those after the first, which finds nothing cached."""
    warm = turns[1:] or turns
    names = ("prompt_tokens", "cached_tokens", "total_before_ms", "total_after_ms")
    prompt, cached, before, after = (sum(each[name] for each in turns) for name in names)
    return {
        "outputs_identical": all(each["identical"] for each in turns),
        "prompt_tokens": prompt,
        "reused_tokens": cached,
        "computed_tokens": prompt - cached,
        "hit_rate": cached / prompt,
        "ttft_ms_cold_median": median(each["ttft_before_ms"] for each in warm),
        "ttft_ms_warm_median": median(each["ttft_after_ms"] for each in warm),
        "ttft_speedup_median": median(each["speedup"] for each in warm),
        "calls_ms_before": before,
        "calls_ms_after": after,
        "turns": turns,
    }
