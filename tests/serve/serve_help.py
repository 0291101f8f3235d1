"""Servers for tests: on a thread of this process, with an engine to look at, and as a process of its own."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import cache

import pytest

import plain_http
from quire import demo_model, ops
from quire.cli.listening import listen
from quire.engines.loop import AsyncEngine, Engine, async_engine
from quire.errors import RequestFailed
from quire.foresight import LiveCurve
from quire.observe.heat import Heat
from quire.serve.server import ModelServer
from quire.serve.service import Bounds, ServedModel
from quire.web.keys import ApiKeys


def loaded():
    """Return quire-tiny in float32 and its tokenizer, of one's own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype="float32").eval()
    return model, AutoTokenizer.from_pretrained(demo_model())


tiny = cache(loaded)


LONG = {
    "model": "quire-tiny",
    "prompt": "Once",
    "max_tokens": 4000,
    "temperature": 0,
    "ignore_eos": True,
}
"""A request that only its client's going ends."""


def short(server, **more):
    return server.post("/v1/completions", {"prompt": "A list", "max_tokens": 2}, **more)


def wait_for(seen, within_s=60):
    until = time.monotonic() + within_s
    while not seen():
        assert time.monotonic() < until
        time.sleep(0.01)


def in_pieces(monkeypatch):
    """Have the first token of each stream be an event of its own; those that come later share one where they must."""
    monkeypatch.setattr(async_engine, "HEARD_S", 60)


def fixtures(**options):
    """Return two fixtures: a server for a whole file, and that after each test nothing of it is held."""

    @pytest.fixture(scope="module")
    def server():
        with running(**options) as made:
            yield made
            made.quiet()

    @pytest.fixture(autouse=True)
    def nothing_stays(server):
        yield
        server.quiet()

    return server, nothing_stays


@contextmanager
def together(server, number):
    """Hold the engine until so many sequences are in flight: none has ended when the last one comes."""
    is_held = threading.Event()

    def hold(_):
        is_held.set()
        wait_for(lambda: server.service.num_inflight == number)

    holding = threading.Thread(target=lambda: asyncio.run(server.service.running.call(hold)))
    holding.start()
    is_held.wait(60)
    yield
    holding.join(60)


class Running:
    """A server that runs: `url`, `service`, `manager`, and clients of it."""

    def __init__(self, server, url, service):
        self.server, self.url, self.service = server, url, service
        self.manager = service.running.engine.manager

    def client(self, key="none-needed", **more):
        return plain_http.openai_client(self.url, key, **more)

    def post(self, path, document=None, **more):
        more |= {"json": document} if document is not None else {}
        return plain_http.post(f"{self.url}{path}", timeout=120, **more)

    def get(self, path, **more):
        return plain_http.get(f"{self.url}{path}", timeout=120, **more)

    def quiet(self, within_s=60):
        """Wait until nothing runs; then nothing may be held, and every invariant holds."""
        until = time.monotonic() + within_s
        while self.service.num_inflight or not self._is_idle():
            assert time.monotonic() < until, "something is still in flight"
            time.sleep(0.02)

    def _is_idle(self):
        try:
            return asyncio.run(self.service.running.call(is_idle))
        except RequestFailed:  # the engine has ended, and its thread does nothing any more
            return is_idle(self.service.running.engine)


def is_idle(engine):
    """Return whether nothing runs, having checked that nothing is held then; on the engine's thread, as a request may come."""
    manager = engine.manager
    if manager.sequences or manager.num_active or engine.has_unfinished():
        return False
    assert [pool.num_active for pool in manager.pools] == [0] * len(manager.pools)
    ops.check(manager)
    return True


@contextmanager
def running(model=None, keys=None, bounds=None, grace_s=None, tokenizer=None, **options):
    """Serve a model, quire-tiny and its tokenizer where none is given, and stop."""
    served, around = options.pop("served", {}), options.pop("around", None)
    options = {"num_blocks": 2048, "watchers": [LiveCurve(), Heat()]} | options
    engine = AsyncEngine(Engine(model or loaded()[0], tokenizer or tiny()[1], **options))
    service = ServedModel(engine, "quire-tiny", keys or ApiKeys(), bounds or Bounds(), **served)
    listening, url = listen("127.0.0.1", 0, service.bounds.slow_s)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # so that a reader can stall
    server = ModelServer(service, grace_s, around)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        made = Running(server, url, service)
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield made
    finally:
        server.should_exit = True
        thread.join(20)
        engine.close()
    assert not thread.is_alive()


SERVE = [sys.executable, "-m", "quire", "serve", "--port", "0", "--json"]


@contextmanager
def command(*words, **env):
    """Start `quire serve`; yield its process and the document that it prints of itself."""
    process = subprocess.Popen(
        [*SERVE, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )
    try:
        said = ""
        while not said.endswith("}\n"):
            line = process.stdout.readline()
            assert line, process.stderr.read()
            said += line
        yield process, json.loads(said)
    finally:
        process.kill()
        process.wait()
