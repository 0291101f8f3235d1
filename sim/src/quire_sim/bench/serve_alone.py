"""One request at a time over HTTP: `quire serve` beside llama.cpp's server, of the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from quire.bench.timing import Row
from quire.cli.server_process import ServerProcess
from quire_sim.bench.serve_http import quire_server, streamed
from quire_sim.bench.serve_loads import AnyLoad
from quire_sim.bench.serve_systems import ServedModelFiles

WARMING = 1 << 20
"""The seed of requests that warm a server: none of those that are timed."""


@dataclass
class OneAtATime:
    """The last request of a load behind the others; medians of all rounds count.

    `llama`  the folder of `llama-server` and `model.gguf`, which benchmarks/peers/llama_server.py makes
    """

    llama: Path = Path(".llama")
    systems = (("quire", ""), ("llama", ""))
    models = ()

    @property
    def server(self) -> Path:
        """llama.cpp's server."""
        return self.llama / "llama-server"

    def open(self, name: str, mode: str, files: ServedModelFiles) -> ServerProcess:
        """Start a server: llama.cpp's with one slot, its fastest setting for one request."""
        if name == "quire":
            return quire_server(files)
        threads = str(torch.get_num_threads())
        command = [str(self.server), "-m", str(self.llama / "model.gguf"), "--parallel", "1", "--ctx-size", "8192",
                   "--threads", threads, "--host", "127.0.0.1"]  # fmt: skip
        return ServerProcess(command, None)

    def begin(self, systems: Mapping[tuple[str, str], Any], load: AnyLoad) -> None:
        """Ask each server once."""
        for server in systems.values():
            self.row(server, load, WARMING)

    def row(self, system: Any, load: AnyLoad, seed: int) -> Row:
        """Ask for the answers of a load, one after another; the last one counts."""
        heard = [
            asyncio.run(streamed(system.port, asked.prompt, load.new))
            for asked in load.requests(seed)
        ]
        last = heard[-1]
        return {"ttft_ms_median": 1e3 * last.first_s, "itl_ms_median": 1e3 * last.between_s}

    def counted(self, rows: Sequence[Row]) -> Row:
        """Return the median of each time."""
        times = ("ttft_ms_median", "itl_ms_median")
        return {**rows[0], **{name: median(float(row[name]) for row in rows) for name in times}}
