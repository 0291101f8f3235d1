"""CPU time and latency that `quire route` adds to a request, before servers that answer without computing.

    python benchmarks/router_overhead.py
    python benchmarks/router_overhead.py --connections 1 --seconds 10

Open loop: requests are sent at a fixed rate over a number of connections, each to its turn. The upstreams are one
process of raw asyncio; CPU time is that of the router's process alone, from /proc. Rows: whole answers of 4 KB, and
streams; each through the router and straight to an upstream.
"""

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path

ANSWER = json.dumps({"choices": [{"text": "x" * 3800}], "usage": {"prompt_tokens": 500}}).encode()
WHOLE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)
    + ANSWER
)
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"data: " + json.dumps({"choices": [{"delta": {"content": " token"}}]}).encode() + b"\n\n"
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)


class Stub(asyncio.Protocol):
    """An upstream's connection: a whole answer after `delay_s`, or a stream of events in that distance."""

    delay_s, num_events = 0.01, 50

    def connection_made(self, transport):
        self.transport, self.data = transport, b""

    def data_received(self, data):
        self.data += data
        head, found, body = self.data.partition(b"\r\n\r\n")
        if not found:
            return
        size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if len(body) < size:
            return
        self.data = b""
        loop = asyncio.get_running_loop()
        if head.startswith(b"GET"):
            self.transport.write(WHOLE)
        elif b'"stream": true' in body:
            self.transport.write(STREAM)
            loop.call_later(self.delay_s, self.event, self.num_events)
        else:
            loop.call_later(self.delay_s, self.transport.write, WHOLE)

    def event(self, left):
        if self.transport.is_closing():
            return
        self.transport.write(CHUNK if left else b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        if left:
            asyncio.get_running_loop().call_later(self.delay_s, self.event, left - 1)


async def stub():
    """Run two upstreams; print their ports."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Stub, "127.0.0.1", 0, backlog=1024) for _ in range(2)]
    ports = [each.sockets[0].getsockname()[1] for each in servers]
    print(json.dumps(ports), flush=True)
    await asyncio.Event().wait()


class Client(asyncio.Protocol):
    """A connection that sends one request at a time; `done` gets the seconds until the end of its answer."""

    def __init__(self, done):
        self.done, self.begun_s, self.data, self.queue = done, None, bytearray(), []

    def connection_made(self, transport):
        self.transport = transport

    def ask(self, request, due_s):
        self.queue.append((request, due_s))
        if self.begun_s is None:
            self.next()

    def next(self):
        self.begun_s = None
        if self.queue:
            request, self.begun_s = self.queue.pop(0)
            self.transport.write(request)

    def data_received(self, data):
        self.data += data
        if self.data.endswith((b"}", b"0\r\n\r\n")) and b"\r\n\r\n" in self.data:
            head, _, body = self.data.partition(b"\r\n\r\n")
            size = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            if size and len(body) < int(size):
                return
            self.done(time.monotonic() - self.begun_s, head.startswith(b"HTTP/1.1 200"))
            self.data.clear()
            self.next()


def requests(count, *, stream):
    """Return requests of conversations of 2 KB, of which eight share a beginning."""
    rng = random.Random(7)
    words = [f"word{at}" for at in range(500)]
    heads = [" ".join(rng.choices(words, k=120)) for _ in range(max(count // 8, 1))]
    made = []
    for _ in range(count):
        talk = [{"role": "system", "content": rng.choice(heads)}]
        talk.append({"role": "user", "content": " ".join(rng.choices(words, k=150))})
        body = json.dumps({"model": "m", "messages": talk, "stream": stream}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        made.append(head.encode() + body)
    return made


async def load(port, made, rate, connections):
    """Send requests at a rate; return the seconds of each answer, and the number that failed."""
    loop, times, failed, ended = asyncio.get_running_loop(), [], 0, asyncio.Event()

    def done(seconds, is_well):
        nonlocal failed
        times.append(seconds)
        failed += not is_well
        if len(times) == len(made):
            ended.set()

    clients = [
        (await loop.create_connection(lambda: Client(done), "127.0.0.1", port))[1]
        for _ in range(connections)
    ]
    begun = time.monotonic() + 0.1
    for at, request in enumerate(made):
        due = begun + at / rate
        await asyncio.sleep(max(due - time.monotonic(), 0))
        clients[at % connections].ask(request, due)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(20):
            await ended.wait()
    for each in clients:
        each.transport.abort()
    return times, failed + len(made) - len(times)


def cpu_s(pid):
    """Return the CPU seconds of a process's threads, to the nanosecond: ticks are too coarse for one that mostly waits."""
    told = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in told) / 1e9


def at(times, share):
    return sorted(times)[min(int(share * len(times)), len(times) - 1)] * 1000


def row(name, ports, pid, made, args):
    """Measure one kind of request; print and return its figures."""
    port, direct = ports
    warm = made[: args.connections + 20]
    asyncio.run(load(port, warm, args.rate, args.connections))
    idle = cpu_s(pid)
    time.sleep(2)
    idle = (cpu_s(pid) - idle) / 2  # looks at upstreams
    before, begun = cpu_s(pid), time.monotonic()
    times, failed = asyncio.run(load(port, made, args.rate, args.connections))
    used = cpu_s(pid) - before - idle * (time.monotonic() - begun)
    straight, _ = asyncio.run(load(direct, made[: len(made) // 2], args.rate, args.connections))
    figures = {
        "row": name,
        "requests": len(times),
        "failed": failed,
        "cpu_ms_per_request": round(1000 * used / len(times), 3),
        "added_p50_ms": round(at(times, 0.5) - at(straight, 0.5), 2),
        "added_p99_ms": round(at(times, 0.99) - at(straight, 0.99), 2),
    }
    if name == "stream":
        whole_ms = row.whole_ms if hasattr(row, "whole_ms") else 0.0
        per_event = (figures["cpu_ms_per_request"] - whole_ms) / Stub.num_events
        figures["cpu_us_per_event"] = round(1000 * per_event, 1)
    else:
        row.whole_ms = figures["cpu_ms_per_request"]
    print(json.dumps(figures), flush=True)
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--stub", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stub:
        asyncio.run(stub())
        return
    with contextlib.ExitStack() as stack:

        def started(*words):
            process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        servers = started(sys.executable, __file__, "--stub")
        ports = json.loads(servers.stdout.readline())
        words = [word for port in ports for word in ("--upstream", f"http://127.0.0.1:{port}")]
        router = started(sys.executable, "-m", "quire", "route", "--port", "0", "--json", *words)
        said = ""
        while not said.endswith("}\n"):
            said += router.stdout.readline()
        port = int(json.loads(said)["url"].rpartition(":")[2])
        time.sleep(1.5)
        count = int(args.rate * args.seconds)
        print(json.dumps({"connections": args.connections, "rate": args.rate}))
        row("whole", (port, ports[0]), router.pid, requests(count, stream=False), args)
        row("stream", (port, ports[0]), router.pid, requests(count, stream=True), args)


if __name__ == "__main__":
    main()
