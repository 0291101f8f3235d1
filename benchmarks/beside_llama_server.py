"""`quire serve` beside llama.cpp's server, the same GGUF file, over HTTP: what people meet on their own machine.

    python benchmarks/peers/llama_server.py MODEL.gguf    # makes .llama/llama-server
    python benchmarks/beside_llama_server.py MODEL.gguf --rounds 5

Sides alternate; a row is the median of its rounds, and `ratio` the median of quire / llama.cpp's of each round. Prompts are
random token ids, answers greedy. llama.cpp's server has one slot; for 48 requests at once 12, the best of 2, 12 and 48:

    behind_3000  first token, ms, of a prompt of 3,000 cached tokens and 48 new ones
    beside_32k   ms from token to token, 64 of them, of one user, while 32,000 tokens of ten other conversations are cached
    agents_8     first token, ms, mean over eight agents in turn, each with 6,000 tokens of its own; a round is a turn, from the
                 second to the fourth; device and host have room for three on both sides, and quire has a disk
    shared_48    requests/s of 48 at once, each one of two prompts of 1,024 tokens and 96 of its own, 64 new
    restarted    first token, ms, of 3,000 tokens that were asked before a restart (llama.cpp's computes them)
    host_20      bytes in host memory, MB, of 20 conversations of 500 tokens behind 2,000 common ones: quire's blocks beside
                 what llama.cpp's prompt cache says of itself, told to take no slot for its similar prompt: else it keeps
                 the last conversation alone
"""

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any, NamedTuple

from quire.cli.server_process import ServerProcess
from quire_sim.bench.serve_http import Heard, all_streamed, streamed
from quire_sim.bench.serve_loads import ServeRequest

ONE = ["--parallel", "1"]
TOKEN_BYTES = 23_040
"""Of K and V of SmolLM2-135M in float16; `--token-bytes` for another model."""


class Sides(NamedTuple):
    """The file that both servers compute, and their threads."""

    model: Path
    server: Path
    threads: int
    token_bytes: int

    @contextmanager
    def quire(self, kv_tokens: int, n_ctx: int, *more: str) -> Generator[ServerProcess]:
        """Serve by quire, with blocks in host memory for so many tokens."""
        command = [sys.executable, "-m", "quire", "serve", "--model", self.model, "--name", "m"]
        command += ["--kv-memory", kv_tokens * self.token_bytes, "--max-running", 64]
        command += ["--gguf", f"n_ctx={n_ctx}", "--gguf", f"n_threads={self.threads}", *more]
        with closing(ServerProcess([*map(str, command)], None)) as server:
            yield server

    @contextmanager
    def llama(self, kv_tokens: int, n_ctx: int, *more: str) -> Generator[ServerProcess]:
        """Serve by llama.cpp, with a prompt cache in host memory for so many tokens."""
        command = [self.server, "-m", self.model, "--threads", self.threads, "--host", "127.0.0.1"]
        command += ["--ctx-size", n_ctx, "--cache-ram", kv_tokens * self.token_bytes >> 20, *more]
        with closing(ServerProcess([*map(str, command)], None)) as server:
            yield server


def tokens(seed: object, num: int) -> list[int]:
    """Return random token ids, the same ones for the same seed."""
    source = Random(repr(seed))
    return [source.randrange(1000, 20_000) for _ in range(num)]


def ask(server: ServerProcess, prompt: list[int], num_new: int = 1) -> Heard:
    """Ask for an answer alone."""
    return asyncio.run(streamed(server.port, prompt, num_new))


def behind_3000(server: ServerProcess, seed: int) -> float:
    prompt = tokens(seed, 3000)
    ask(server, prompt)
    return 1e3 * ask(server, prompt + tokens((seed, "new"), 48), 8).first_s


def beside_32k(server: ServerProcess, seed: int) -> float:
    talks = [tokens(("talk", i), 3200) for i in range(10)]
    for each in talks:  # computed in the first round, found in the others
        ask(server, each)
    return 1e3 * ask(server, talks[-1] + tokens((seed, "new"), 16), 64).between_s


def shared_48(server: ServerProcess, seed: int) -> float:
    heads = [tokens((seed, i), 1024) for i in range(2)]
    asked = [
        ServeRequest(heads[i % 2] + tokens((seed, "own", i), 96), str(i), 0.0) for i in range(48)
    ]
    heard, seconds = asyncio.run(all_streamed(server, asked, 64))
    return len(heard) / seconds


def restarted(server: AbstractContextManager[ServerProcess], prompt: list[int]) -> float:
    """Start a server, and return the first token's ms."""
    with server as started:
        ask(started, tokens("warm", 64))
        return 1e3 * ask(started, prompt, 8).first_s


def talks_20(server: ServerProcess) -> None:
    head = tokens("head", 2000)
    for i in range(20):
        ask(server, head + tokens(i, 500), 2)
    ask(server, tokens("end", 64), 2)  # the slot's own conversation goes to the cache too


def host_bytes_quire(server: ServerProcess, token_bytes: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
        told = answer.read().decode()
    (blocks,) = re.findall(r'^quire_blocks{.*state="cached"} (\S+)', told, re.MULTILINE)
    return float(blocks) * 16 * token_bytes / 1e6


def host_bytes_llama(server: ServerProcess) -> float:
    *_, (prompts, mib) = re.findall(r"cache state: +(\d+) prompts, +([\d.]+) MiB", server.said())
    if int(prompts) < 20:
        raise SystemExit(f"llama.cpp's prompt cache kept {prompts} of 20 conversations")
    return float(mib) * 2**20 / 1e6


Row = Callable[[Sides, int], Generator[tuple[float, float]]]


def of_calls(
    measure: Callable[[ServerProcess, int], float], quire: list[Any], llama: list[Any]
) -> Row:
    """Return a row whose servers stay up: `measure` is called with each in turn, once to warm up."""

    def run(sides: Sides, rounds: int) -> Generator[tuple[float, float]]:
        with sides.quire(*quire) as ours, sides.llama(*llama) as theirs:
            for seed in range(rounds + 1):
                pair = [ours, theirs]
                found = {each.port: measure(each, seed) for each in pair[:: 1 - 2 * (seed % 2)]}
                if seed:
                    yield found[ours.port], found[theirs.port]

    return run


def agents_8(sides: Sides, rounds: int) -> Generator[tuple[float, float]]:
    prompts: list[list[int]] = []

    def turn(server: ServerProcess) -> float:
        return 1e3 * mean(ask(server, each, 16).first_s for each in prompts)

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        disk = ["--tier", f"disk:{folder}?capacity=8GiB"]
        ours = stack.enter_context(sides.quire(19_200, 19_200, *disk))
        shared = ["--parallel", "3", "--kv-unified"]
        theirs = stack.enter_context(sides.llama(19_200, 24_576, *shared))
        for at in range(4 * -(-rounds // 3)):
            seed, number = divmod(at, 4)
            if number == 0:
                prompts = [tokens((seed, i), 6000) for i in range(8)]
            prompts = [each + tokens((seed, i, number), 116) for i, each in enumerate(prompts)]
            pair = [ours, theirs]
            found = {each.port: turn(each) for each in pair[:: 1 - 2 * (at % 2)]}
            if number:
                yield found[ours.port], found[theirs.port]


def after_restart(sides: Sides, rounds: int) -> Generator[tuple[float, float]]:
    for seed in range(rounds):
        prompt = tokens(seed, 3000)
        with tempfile.TemporaryDirectory() as folder:
            tier = ["--tier", f"disk:{folder}?capacity=2GiB"]
            restarted(sides.quire(8192, 8192, *tier), prompt)
            ours = restarted(sides.quire(8192, 8192, *tier), prompt)
        yield ours, restarted(sides.llama(8192, 8192, *ONE), prompt)


def in_host_memory(sides: Sides, rounds: int) -> Generator[tuple[float, float]]:
    with sides.quire(65_536, 8192) as server:
        talks_20(server)
        ours = host_bytes_quire(server, sides.token_bytes)
    told = ["--slot-prompt-similarity", "0", "--verbosity", "4"]
    with sides.llama(65_536, 8192, *ONE, *told) as server:
        talks_20(server)
        theirs = host_bytes_llama(server)
    yield from [(ours, theirs)] * min(rounds, 1)  # bytes do not waver


ROWS: dict[str, tuple[float, Row]] = {
    "behind_3000": (0.5, of_calls(behind_3000, [65_536, 8192], [65_536, 8192, *ONE])),
    "beside_32k": (1.15, of_calls(beside_32k, [65_536, 8192], [65_536, 8192, *ONE])),
    "shared_48": (
        1.35,
        of_calls(
            shared_48,
            [65_536, 65_536],
            [65_536, 65_536, "--parallel", "12"],
        ),
    ),
    "restarted": (0.1, after_restart),
    "host_20": (0.4, in_host_memory),
    "agents_8": (0.15, agents_8),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--server", type=Path, default=Path(".llama/llama-server"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--token-bytes", type=int, default=TOKEN_BYTES)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    sides = Sides(given.model, given.server, given.threads, given.token_bytes)
    for name in given.rows.split(","):
        bar, row = ROWS[name]
        pairs: list[tuple[float, float]] = []
        for ours, theirs in row(sides, given.rounds):
            pairs.append((ours, theirs))
            print(
                f"{name}: {ours:.4g} {theirs:.4g} {ours / theirs:.3f}", file=sys.stderr, flush=True
            )
        ours, theirs = (median(each) for each in zip(*pairs, strict=True))
        ratio = median(a / b for a, b in pairs)
        found = {
            "row": name,
            "quire": ours,
            "llama": theirs,
            "ratio": ratio,
            "bar": bar,
            "rounds": len(pairs),
        }
        print(
            json.dumps(found)
            if given.json
            else f"{name:12} quire {ours:8.4g}  llama.cpp {theirs:8.4g}  ratio {ratio:.3f} (bar {bar})",
            flush=True,
        )


if __name__ == "__main__":
    main()
