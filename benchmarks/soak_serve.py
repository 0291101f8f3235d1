"""Ask a real server for everything that goes wrong, for as long as is wanted, and look at what stays behind.

    python benchmarks/soak_serve.py --requests 5000 [--minutes 60] [--clients 24] [--seed 0] [--json]

The server runs in a process of its own: the small model, a pool that a few requests fill, with a part of the model that
fails once in so many forwards. Clients ask at once, each for one thing after another, drawn at random:

    whole, stream                  texts that share prefixes; n, drawn tokens, log-probabilities, stop strings, a schema
    gone before, gone in between   of a whole answer and of a stream
    pipelined                      a stream and more requests at once, of one who goes then
    slow                           a stream of which nothing is taken any more
    bad                            no JSON, bad values, too long a prompt, a model that is not here, 10 MB
    dropped                        a connection that says nothing, or half a head
    late                           a deadline that passes
    operator                       metrics, state, what if, explain, pin, evict

Again and again all clients wait until nothing runs, and the server is looked at: its invariants, blocks and sequences
held, asyncio tasks, threads, open files, resident memory. It fails where something is held or not answered, where tasks,
threads or files grow, or where memory grows by more than 2 % in the last third of the run. What torch keeps of shapes that
it has seen is kept as small as `quire serve` keeps it.
"""

import argparse
import asyncio
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx

from quire.cli.serve import OF_SHAPES

BLOCKS, SLOW_S, FAILS, STUCK_S = 160, 1.5, 300, 60.0
TEXT = "A list in Python is a thing that holds other things, in an order which it keeps. " * 4
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
BAD = (
    b"{",
    b"\xff",
    b"[" * 50_000,
    b'{"prompt": ""}',
    b'{"prompt": "a", "temperature": -1}',
    b'{"prompt": "a", "model": "gpt-4"}',
    b'{"prompt": [99999]}',
    b'{"prompt": "a", "n": 1000}',
    b'{"prompt": "a", "max_tokens": 99999}',
    b'{"prompt": "' + b"a" * 9000 + b'"}',
    b'{"prompt": "' + b"a" * (10 << 20) + b'"}',
)


# -- the server ------------------------------------------------------------------------------


def serve():
    """Serve on a port that is printed, with one route more, that tells what is held."""
    import torch
    from starlette.responses import JSONResponse
    from starlette.routing import Route
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from quire import demo_model, ops
    from quire.engines.loop import AsyncEngine, Engine
    from quire.foresight import LiveCurve
    from quire.observe.overview import Heat
    from quire.serve.server import ModelServer
    from quire.serve.service import Bounds, ServedModel
    from quire.web.keys import ApiKeys

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(demo_model()).eval()
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    options = {"num_blocks": BLOCKS, "max_running": 12, "watchers": [LiveCurve(), Heat()]}
    running = AsyncEngine(Engine(model, tokenizer, **options))
    service = ServedModel(running, "quire-tiny", ApiKeys(), Bounds(max_inflight=40, slow_s=SLOW_S))
    chance = random.Random(0)

    def fail(*_):
        if chance.randrange(FAILS) == 0:
            raise RuntimeError("a part of the model broke")

    model.model.layers[2].register_forward_pre_hook(fail)

    async def look(_):
        def held(engine):
            engine.manager.kernel.holds.let_go_expired()  # pins whose time is over
            ops.check(engine.manager)
            engine.scheduler.check()
            blocks = sum(pool.num_active for pool in engine.manager.pools)
            return blocks, len(engine.manager.sequences), engine.stats()

        blocks, sequences, stats = await running.call(held)
        return JSONResponse({
            "blocks": blocks,
            "sequences": sequences,
            "inflight": service.num_inflight,
            "tasks": len(asyncio.all_tasks()),
            "threads": threading.active_count(),
            "files": num_files(),
            "rss_mib": round(rss() / 2**20, 1),
            "steps": stats.steps,
            "preemptions": stats.preemptions,
            "failed": stats.failed_requests,
        })  # fmt: skip

    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # so that a reader can stall
    server = ModelServer(service)
    server.config.app.routes.append(Route("/look", look))
    print(listening.getsockname()[1], flush=True)
    try:
        server.run(sockets=[listening])
    finally:
        running.close()


def num_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def rss():
    """Bytes of resident memory, without what the C library keeps for itself."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# -- its clients -----------------------------------------------------------------------------


class Crowd:
    """Clients that ask until there were enough requests; `told` counts what they were told, by kind."""

    def __init__(self, port, seed):
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.random, self.told = random.Random(seed), Counter()
        self.http = httpx.AsyncClient(timeout=STUCK_S, limits=httpx.Limits(max_connections=None))

    @property
    def num_asked(self):
        return sum(self.told.values())

    async def ask_until(self, clients, until, most):
        """Have so many clients ask until a time, or until so many requests were asked."""

        async def client():
            while time.monotonic() < until and self.num_asked < most:
                kind = self.random.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
                try:
                    async with asyncio.timeout(STUCK_S):
                        told = await getattr(self, kind)()
                except TimeoutError:
                    told = "stuck"
                except httpx.HTTPError as error:
                    told = type(error).__name__
                self.told[kind, told] += 1

        await asyncio.gather(*[client() for _ in range(clients)])

    def document(self, **more):
        pick = self.random.choice
        asked = {
            "prompt": TEXT[: self.random.randrange(1, len(TEXT))] + pick(("", str(time.time()))),
            "max_tokens": pick((1, 8, 30, 80)),
            "temperature": pick((0, 0, 1)),
            "n": pick((1, 1, 1, 3)),
            "logprobs": pick((None, None, 2)),
            "stop": pick((None, None, [" is"])),
            "speculation": pick((0, 4)),
            "ignore_eos": pick((True, False)),
            "priority": pick((0, 0, 3)),
            "session_id": pick((None, "s")),
        }
        return {name: value for name, value in (asked | more).items() if value is not None}

    async def post(self, **more):
        answer = await self.http.post(f"{self.url}/v1/completions", json=self.document(**more))
        return answer.status_code

    async def whole(self):
        return await self.post()

    async def chat(self):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        asked = {
            "messages": [{"role": "user", "content": TEXT[: self.random.randrange(1, 99)]}],
            "response_format": self.random.choice((None, form)),
            "max_tokens": 20,
        }
        answer = await self.http.post(f"{self.url}/v1/chat/completions", json=asked)
        return answer.status_code

    async def stream(self, most=10**9):
        asked = self.document(stream=True)
        async with self.http.stream("POST", f"{self.url}/v1/completions", json=asked) as answer:
            last = ""
            async for line in answer.aiter_lines():
                last = line or last
                most -= 1
                if most < 0:
                    return "left"
        if answer.status_code != 200:
            return answer.status_code
        return "whole" if last == "data: [DONE]" else f"ends with {last[:60]}"

    async def gone_in_between(self):
        return await self.stream(self.random.randrange(1, 9))

    async def gone_before(self):
        try:
            async with asyncio.timeout(self.random.choice((0.01, 0.1, 0.4))):
                return await self.post(max_tokens=400, ignore_eos=True)
        except TimeoutError:
            return "left"

    async def raw(self, data):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=4096)
        writer.write(data)
        await writer.drain()
        return reader, writer

    def long(self):
        """A request as it is sent that only its client's going ends."""
        asked = self.document(stream=True, n=3, logprobs=5, max_tokens=900, ignore_eos=True)
        body = json.dumps(asked).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}"
        return head.encode() + b"\r\n\r\n" + body

    async def pipelined(self):
        more = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        _, writer = await self.raw(self.long() + more * self.random.randrange(1, 4))
        await asyncio.sleep(self.random.choice((0.01, 0.1, 0.4)))
        writer.transport.abort()
        return "left"

    async def slow(self):
        reader, writer = await self.raw(self.long())
        await reader.read(100)
        await asyncio.sleep(SLOW_S * self.random.choice((0.5, 3)))
        writer.transport.abort()
        return "left"

    async def dropped(self):
        said = self.random.choice(
            (b"", b"POST /v1/comp", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\na")
        )
        _, writer = await self.raw(said)
        writer.transport.abort()
        return "left"

    async def bad(self):
        body = self.random.choice(BAD)
        answer = await self.http.post(f"{self.url}/v1/completions", content=body)
        return answer.status_code

    async def late(self):
        return await self.post(deadline_s=self.random.choice((0.001, 0.2)), max_tokens=200)

    async def operator(self):
        prompt = {"prompt": TEXT[: self.random.randrange(1, len(TEXT))]}
        path, asked = self.random.choice((
            ("metrics", None),
            ("v1/cache", None),
            ("", None),
            ("v1/cache/what-if?memory=0.5,2", None),
            ("v1/cache/explain", prompt),
            ("v1/cache/pin", prompt | {"ttl_s": 1}),
            ("v1/cache/evict", prompt),
            ("v1/cache/evict", {"num_blocks": 20}),
        ))  # fmt: skip
        url = f"{self.url}/{path}"
        return (
            await (self.http.post(url, json=asked) if asked else self.http.get(url))
        ).status_code

    async def quiet(self, within_s=30.0):
        """Wait until nothing runs, with no pin left; return what the server has of itself then."""
        pins = f"{self.url}/v1/cache/pins"
        for pin in (await self.http.get(pins)).json()["data"]:
            await self.http.delete(f"{pins}/{pin['id']}")
        until = time.monotonic() + within_s
        while True:
            found = (await self.http.get(f"{self.url}/look")).json()
            if not (found["sequences"] or found["inflight"]) or time.monotonic() > until:
                return found
            await asyncio.sleep(0.1)


WEIGHTS = {
    "whole": 30,
    "chat": 10,
    "stream": 20,
    "gone_in_between": 8,
    "gone_before": 8,
    "pipelined": 4,
    "slow": 2,
    "dropped": 10,
    "bad": 8,
    "late": 4,
    "operator": 8,
}
COLUMNS = "requests seconds blocks sequences inflight tasks threads files rss_mib steps preemptions failed"


async def soak(args, port):
    """Return what was found at each quiet point, and what the clients were told."""
    crowd, found = Crowd(port, args.seed), []
    begun = time.monotonic()
    while crowd.num_asked < args.requests and time.monotonic() - begun < args.minutes * 60:
        most = min(crowd.num_asked + -(-args.requests // args.pieces), args.requests)
        await crowd.ask_until(args.clients, begun + args.minutes * 60, most)
        await crowd.http.aclose()
        crowd.http = httpx.AsyncClient(timeout=STUCK_S, limits=httpx.Limits(max_connections=None))
        row = await crowd.quiet()
        row |= {"requests": crowd.num_asked, "seconds": round(time.monotonic() - begun)}
        found.append(row)
        if not args.json:
            print(*[f"{row[name]:>{len(name)}}" for name in COLUMNS.split()], flush=True)
    await crowd.http.aclose()
    return found, crowd.told


def wrongs(found, told):
    """Return what is wrong."""
    wrong = [
        f"{kind} was answered {what}"
        for kind, what in told
        if what in (500, "stuck") and kind in ("bad", "operator")
    ]
    wrong += [
        f"{count} {kind} were stuck" for (kind, what), count in told.items() if what == "stuck"
    ]
    for name in ("blocks", "sequences", "inflight"):
        wrong += [
            f"{row[name]} {name} held after {row['requests']} requests"
            for row in found
            if row[name]
        ]
    third = found[len(found) // 3]
    late = found[-1 - len(found) // 3]
    for name in ("tasks", "threads", "files"):
        if found[-1][name] > max(row[name] for row in found[: len(found) // 3 + 1]) + 2:
            wrong.append(f"{name} grew from {third[name]} to {found[-1][name]}")
    if found[-1]["rss_mib"] > late["rss_mib"] * 1.02:
        wrong.append(f"memory grew from {late['rss_mib']} to {found[-1]['rss_mib']} MiB")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--pieces", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    command = [sys.executable, __file__, "--serve"]
    environment = OF_SHAPES | os.environ
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as server:
        try:
            port = int(server.stdout.readline())
            if not args.json:
                print(COLUMNS)
            found, told = asyncio.run(soak(args, port))
        finally:
            server.send_signal(signal.SIGTERM)
    wrong = wrongs(found, told)
    counts = {f"{kind}: {what}": count for (kind, what), count in sorted(told.items(), key=str)}
    if args.json:
        print(json.dumps({"found": found, "told": counts, "wrong": wrong}))
    else:
        print(*[f"{count:>7} {what}" for what, count in counts.items()], sep="\n")
        print(*wrong or ["nothing stays behind"], sep="\n")
    sys.exit(bool(wrong) or server.returncode not in (0, -signal.SIGTERM))


if __name__ == "__main__":
    main()
