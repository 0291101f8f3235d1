"""The demo's two runs against a server: the same conversations with reuse and without, asked by OpenAI's client."""

import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any, Self

import httpx
import openai

from quire.cli.chat import Messages, message
from quire.cli.comparison import DemoSize, Side, SideBySide
from quire.cli.server_process import HOST, ServerProcess

_TIMEOUT_S = 300


class ServedSides(SideBySide):
    """A server that is asked everything twice, one after the other: apart from all else, then with what is cached.

    `url` is where it listens while the `with` block lasts.
    """

    def __init__(self, words: Sequence[str], size: DemoSize) -> None:
        command = [sys.executable, "-m", "quire", "serve", "--name", "demo", *words]
        self._server = ServerProcess(command, None)
        self.url = f"http://{HOST}:{self._server.port}"
        self._client: Any = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=_TIMEOUT_S
        )
        self._http = httpx.Client(base_url=self.url, timeout=_TIMEOUT_S)
        self._begin(size, self._count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._client.close()
        self._server.close()

    def warm_up(self) -> None:
        talk = [message("user", "The first call sets things up.")]
        for salt in ("warm", None):
            self._ask(talk, salt, max_tokens=4)

    def ended(self) -> dict[str, Any]:
        state = self._http.get("/v1/cache").raise_for_status().json()
        return {"pool": state["groups"][0], "stats": state["stats"]}

    def _sides(self, before: Messages, after: Messages, num_samples: int) -> tuple[Side, Side]:
        asked: dict[str, Any] = {"temperature": 0, "max_tokens": self._size.max_new_tokens}
        if num_samples:
            asked |= {"n": num_samples, "temperature": 1, "seed": self._size.seed}
        plain = self._ask(before, uuid.uuid4().hex, **asked)
        return plain, self._ask(after, None, **asked)

    def _ask(self, talk: Messages, salt: str | None, **asked: Any) -> Side:
        """Ask for the next reply; what has a salt of its own shares nothing, and nothing of it is kept for others."""
        more = {} if salt is None else {"cache_salt": salt, "reuse": "never"}
        usage: Any = None
        replies, ttft_s = [""] * asked.get("n", 1), 0.0
        began_s = time.perf_counter()
        stream = self._client.chat.completions.create(
            model="demo", messages=talk, stream=True, stream_options={"include_usage": True},
            extra_body=more, **asked,
        )  # fmt: skip
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                if choice.delta.content:
                    ttft_s = ttft_s or time.perf_counter() - began_s
                    replies[choice.index] += choice.delta.content
        total_s = time.perf_counter() - began_s
        cached = usage.prompt_tokens_details.cached_tokens
        return Side(replies, replies, usage.prompt_tokens, cached, ttft_s or total_s, total_s)

    def _count(self, text: str) -> int:
        told = self._http.post("/tokenize", json={"prompt": text}).raise_for_status().json()
        return told["count"]
