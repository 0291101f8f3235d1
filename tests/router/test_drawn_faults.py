"""Requests through a proxy whose upstreams die, hang, restart, are added and removed, as drawn.

Three plans: `one` breaks a machine only once all are well again, `several` breaks them as it comes, and `both` takes
turns.
"""

import asyncio
import json
import random
from collections import defaultdict
from math import inf

import pytest
import uvicorn

import quire_router.fleet
import quire_router.upstreams
from quire.routing import PrefixAware
from quire.web.clients import UVICORN
from quire.web.keys import ApiKeys
from quire_router.listing import UpstreamList
from quire_router.prefixes import SentPrefixes
from quire_router.proxy import Proxy, ProxyLimits

BODY = b'{"choices": [{"text": "an answer"}]}'
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY  # fmt: skip
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'14\r\ndata: {"piece": 1}\n\n\r\n'
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
PAUSE_S = 0.05
"""So long a client that was refused waits: an outage does not use up all requests, however fast the machine is."""


class FaultyServer:
    """An upstream that can die, hang and restart; `seen` has each sight of a request, `begun` those it answered."""

    def __init__(self, world):
        self.world, self.port, self.server = world, 0, None
        self.writers, self.going_on = set(), asyncio.Event()
        self.going_on.set()

    async def start(self):
        self.server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    def die(self):
        self.server.close()
        for writer in [*self.writers]:
            writer.transport.abort()

    async def _connected(self, reader, writer):
        self.writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
                body = await reader.readexactly(int(size or 0))
                asked = json.loads(body) if body else None
                if asked is not None:
                    self.world.see(asked["user"], self.port)
                was_hung = not self.going_on.is_set()
                await self.going_on.wait()
                if writer.transport.is_closing():
                    break
                if asked is None:
                    writer.write(WHOLE)
                else:
                    await self._answer(asked, writer, was_hung=was_hung)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writers.discard(writer)
            writer.transport.abort()

    async def _answer(self, asked, writer, *, was_hung):
        world, name = self.world, asked["user"]
        if asked["prompt"].startswith("poison"):
            self.die()
            world.later(0.3, self.start)
            raise ConnectionError
        await asyncio.sleep(world.rng.choice((0, 0.001, 0.02)))
        was_hung = was_hung or not self.going_on.is_set()
        await self.going_on.wait()
        if writer.transport.is_closing():
            raise ConnectionError
        # The proxy may have given a hung server up at this very moment: no byte comes to it.
        world.begun[name] |= not was_hung
        if not asked["stream"]:
            writer.write(WHOLE)
            return
        writer.write(STREAM + EVENT)
        await asyncio.sleep(0.005)
        await self.going_on.wait()
        writer.write(DONE)
        await writer.drain()


class World:
    """Machines, a proxy before them, clients, and what is wrong with what they saw."""

    def __init__(self, seed, file):
        self.rng, self.file = random.Random(seed), file
        self.seen, self.begun = defaultdict(list), defaultdict(bool)
        self.machines, self.faults, self.failures, self.tasks = [], [], [], set()
        self.is_over, self.poison = False, 0.0
        self.outages = []  # of several machines: when each began, and when all were well again

    def later(self, seconds, what):
        async def do():
            await asyncio.sleep(seconds)
            await what()

        task = asyncio.ensure_future(do())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def see(self, name, port):
        if self.begun[name]:
            self.faults.append(f"{name} was sent again after its first byte")
        self.seen[name].append(port)

    def list(self, machines):
        self.file.write_text("".join(f"http://127.0.0.1:{each.port}\n" for each in machines))

    async def run(self, num_requests, plan, num_clients):
        self.machines = [FaultyServer(self) for _ in range(3)]
        for each in self.machines:
            await each.start()
        self.list(self.machines)
        proxy = Proxy(
            UpstreamList([], self.file),
            PrefixAware(4.0),
            SentPrefixes(1 << 12),
            ApiKeys(),
            ProxyLimits(hung_s=2.0),
        )
        server = uvicorn.Server(
            uvicorn.Config(proxy.app(), port=0, timeout_keep_alive=60, **UVICORN)
        )
        serving = asyncio.ensure_future(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        await self._well(proxy, 3)
        breaking = asyncio.ensure_future(self._break(proxy, plan))
        numbers = iter(range(num_requests))
        await asyncio.gather(*(self._client(port, numbers) for _ in range(num_clients)))
        self.is_over = True
        await breaking
        await asyncio.gather(*self.tasks)
        await self._well(proxy, 3)
        idle = [each for each in proxy.upstreams if not each.num_inflight]
        assert idle == proxy.upstreams
        server.should_exit = True
        await serving
        proxy.prefixes.index.check()
        for each in self.machines:
            each.die()
        for name, ports in self.seen.items():
            if len(ports) > 2:
                self.faults.append(f"{name} was sent {len(ports)} times")
        assert len(self.seen) > 0.5 * num_requests

    async def _well(self, proxy, count):
        while sum(each.is_well for each in proxy.fleet.staying) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def _break(self, proxy, plan):
        """Break machines until the end, as a plan says."""
        loop = asyncio.get_running_loop()
        while not self.is_over:
            until = loop.time() + self.rng.uniform(3, 9)
            while plan != "several" and loop.time() < until and not self.is_over:
                await self._break_one()
                await asyncio.sleep(0.3)
                await self._well(proxy, 3)
                await asyncio.sleep(0.3)
            if plan == "one" or self.is_over:
                continue
            self.outages.append([loop.time(), inf])
            self.poison = 0.002
            while loop.time() < until + 3 and not self.is_over:
                await self._break_one()
            self.poison = 0.0
            await asyncio.sleep(0.5)  # until poison that was sent has done its harm
            await self._well(proxy, 3)
            await asyncio.sleep(0.3)
            self.outages[-1][1] = loop.time()

    async def _break_one(self):
        """Break a machine, and mend it."""
        machine = self.rng.choice(self.machines)
        what = self.rng.choice(("die", "die", "hang", "remove", "replace"))
        if what == "die" and machine.server.is_serving():
            machine.die()
            await asyncio.sleep(self.rng.uniform(0.05, 0.8))
            if not machine.server.is_serving():
                await machine.start()
        elif what == "hang":
            machine.going_on.clear()
            await asyncio.sleep(self.rng.uniform(0.2, 4.0))
            machine.going_on.set()
        elif what == "remove":
            self.list(each for each in self.machines if each is not machine)
            await asyncio.sleep(self.rng.uniform(0.1, 0.6))
            self.list(self.machines)
        elif what == "replace":
            fresh = FaultyServer(self)
            await fresh.start()
            self.machines[self.machines.index(machine)] = fresh
            self.list(self.machines)
            await asyncio.sleep(1.0)  # its requests end
            machine.die()

    async def _client(self, port, numbers):
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in numbers:
            name, stream = f"request {number}", self.rng.random() < 0.4
            is_poison = self.rng.random() < self.poison
            prompt = "poison" if is_poison else "text " * 30 + str(number % 40)
            asked = {"prompt": prompt, "user": name, "stream": stream}
            body = json.dumps(asked).encode()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)  # fmt: skip
            since = loop.time()
            async with asyncio.timeout(60):
                head, said = await self._answer(reader)
            if not self._judge(name, head, said, since, stream=stream):
                await asyncio.sleep(PAUSE_S)
        writer.transport.abort()

    async def _answer(self, reader):
        head = await reader.readuntil(b"\r\n\r\n")
        if size := head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]:
            return head, await reader.readexactly(int(size))
        said = b""
        while not said.endswith(b"\r\n0\r\n\r\n"):
            said += await reader.readuntil(b"\n")
        return head, said

    def _judge(self, name, head, said, since, *, stream):
        """Take note of what is wrong with an answer; return whether there was one."""
        status = int(head.split(b" ", 2)[1])
        if status == 200:
            is_right = said.startswith(EVENT) and b"[DONE]" in said if stream else said == BODY
            if not is_right:
                self.faults.append(f"{name}: {said!r}")
        elif status in (502, 503, 504):
            if not json.loads(said)["error"]["message"]:
                self.faults.append(f"{name}: {status} without a reason")
            if not any(since <= end for _, end in self.outages):
                self.faults.append(f"{name}: {status} while one machine was down: {said!r}")
            self.failures.append((name, status, said, self.seen[name]))
        else:
            self.faults.append(f"{name}: {status}")
        return status == 200


def play(num_requests, file, monkeypatch, plan, *, seed, num_clients=24):
    monkeypatch.setattr(quire_router.upstreams, "CHECK_S", 0.1)
    monkeypatch.setattr(quire_router.upstreams, "PATIENCE_S", 1.0)
    monkeypatch.setattr(quire_router.fleet, "CHECK_S", 0.1)
    world = World(seed, file)
    asyncio.run(world.run(num_requests, plan, num_clients))
    assert not world.faults, world.faults[:9]
    return world


@pytest.mark.ci
def test_no_request_fails_while_one_upstream_at_most_is_down(tmp_path, monkeypatch):
    world = play(3000, tmp_path / "list", monkeypatch, "one", seed=1)
    assert not world.failures


@pytest.mark.ci
def test_each_request_is_answered_or_refused_with_a_reason_and_two_upstreams_see_it(
    tmp_path, monkeypatch
):
    world = play(3000, tmp_path / "list", monkeypatch, "several", seed=2)
    assert (
        len(world.failures) < 2700
    )  # those of an outage are refused at once: more the faster the machine


@pytest.mark.long
@pytest.mark.parametrize("plan", ["one", "several"])
@pytest.mark.parametrize("seed", range(5))
def test_ten_thousand_requests(tmp_path, monkeypatch, seed, plan):
    play(10_000, tmp_path / "list", monkeypatch, plan, seed=seed)


@pytest.mark.long
def test_a_hundred_thousand_requests_in_one_run(tmp_path, monkeypatch):
    """About ten minutes."""
    world = play(100_000, tmp_path / "list", monkeypatch, "both", seed=7, num_clients=64)
    assert len(world.seen) > 90_000
    assert len(world.outages) > 9
    assert 0 < len(world.failures) < 30_000
