"""A short request and a stream beside a prompt of 7,000 tokens, at several bounds of a step's time, over HTTP.

python benchmarks/beside_long_prompt.py --model smollm2 --bounds 0,0.25,0.08

A row per bound (`quire serve --max-inter-token`, 0: none), medians of rounds:

    short alone    seconds of a request of 20 tokens, one new, while nothing else runs
    short beside   seconds of such requests while the long prompt is computed, one every 2 s, and of the slowest
    gap            the 99th percentile of the times between tokens of a stream meanwhile
    tokens         of the stream meanwhile
    long           seconds of the long prompt's first token, beside both; `ratio`: against that with bound 0
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from random import Random
from statistics import median, quantiles
from threading import Thread
from time import perf_counter, sleep
from typing import Any
from urllib.parse import urlsplit

PAUSE_S = 0.25
"""Before the long prompt comes to a stream."""

EVERY_S = 2.0
"""From one short request to the next, or as long as it takes."""


class Client:
    """Asks a server for completions of random token ids, which no two prompts share."""

    def __init__(self, url: str, seed: int) -> None:
        self.address = urlsplit(url).netloc
        self.random = Random(seed)

    def stream(self, length: int, max_tokens: int) -> Generator[float]:
        """Yield the time of each event of an answer."""
        body = {
            "prompt": [self.random.randrange(1000, 20_000) for _ in range(length)],
            "max_tokens": max_tokens,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
        with closing(HTTPConnection(self.address, timeout=600)) as connection:
            head = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), head)
            answer = connection.getresponse()
            if answer.status != 200:
                raise SystemExit(answer.read().decode())
            for line in answer:
                if line.startswith(b"data: {"):
                    yield perf_counter()

    def seconds(self, length: int) -> float:
        """Return the seconds to the first token of a prompt."""
        begun = perf_counter()
        return next(self.stream(length, 1)) - begun


@contextmanager
def served(model: str, bound: float, more: list[str]) -> Generator[str]:
    """Serve a model, and yield its URL."""
    command = [sys.executable, "-m", "quire", "serve", "--model", model, "--port", "0", "--json"]
    command += ["--max-inter-token", str(bound), "--kv-memory", "2GiB", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield json.loads("".join(iter(server.stdout.readline, "}\n")) + "}")["url"]
        finally:
            server.terminate()


def measured(url: str, length: int, seed: int) -> dict[str, float]:
    """Return the figures of one round."""
    client = Client(url, seed)
    client.seconds(20)
    alone = median(client.seconds(20) for _ in range(5))
    times: list[float] = []
    is_done = False

    def follow() -> None:
        for at in client.stream(20, 4000):
            times.append(at)
            if is_done:
                return

    following = Thread(target=follow)
    following.start()
    while len(times) < 5:
        sleep(PAUSE_S)
    long: list[float] = []
    asking = Thread(target=lambda: long.append(Client(url, seed + 1).seconds(length)))
    begun = perf_counter()
    asking.start()
    sleep(PAUSE_S)
    short: list[float] = []
    while asking.is_alive():
        short.append(Client(url, seed + 2 + len(short)).seconds(20))
        sleep(max(EVERY_S - short[-1], 0))
    ended, is_done = perf_counter(), True
    following.join()
    within = [at for at in times if begun <= at <= ended]
    gaps = [after - before for before, after in itertools.pairwise(within)]
    gap = quantiles(gaps, n=100)[-1] if len(gaps) > 1 else ended - begun
    return {
        "short alone": alone,
        "short beside": median(short),
        "short slowest": max(short),
        "gap": gap,
        "tokens": float(len(within)),
        "long": long[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bounds", default="0,0.25,0.08")
    parser.add_argument("--length", type=int, default=7000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    bounds = [float(each) for each in given.bounds.split(",")]
    found: dict[float, list[dict[str, float]]] = {bound: [] for bound in bounds}
    for number in range(given.rounds):
        for bound in bounds:
            with served(given.model, bound, ["--dtype", given.dtype]) as url:
                found[bound].append(measured(url, given.length, 1000 * number))
            print(f"round {number + 1}, bound {bound:g}: {found[bound][-1]}", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for bound, rounds in found.items():
        row = {name: median(each[name] for each in rounds) for name in rounds[0]}
        pairs = zip(rounds, found[bounds[0]], strict=True)
        ratio = median(each["long"] / first["long"] for each, first in pairs)
        rows.append({"bound": bound} | row | {"ratio": ratio})
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
