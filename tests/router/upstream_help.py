"""Servers that speak enough of OpenAI's protocol to be routed to, and fail as they are told; a router before them."""

import asyncio
import gzip
import json
import socket
import threading
import time
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import plain_http
from quire.routing import PrefixAware
from quire.web.cors import with_cors
from quire.web.keys import ApiKeys
from quire.web.protocol import HttpProtocol
from quire_router.listing import Listed, UpstreamList
from quire_router.prefixes import SentPrefixes
from quire_router.proxy import Proxy, ProxyLimits


@contextmanager
def served(app, port=0):
    """Serve an application on a thread; yield its URL."""
    listening = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(
        app, http=HttpProtocol, log_level="error", access_log=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()
    assert not thread.is_alive()


def wait_for(seen, within_s=60):
    until = time.monotonic() + within_s
    while not seen():
        assert time.monotonic() < until
        time.sleep(0.01)


class FakeUpstream:
    """A server that answers with its name; `mood` says how: well, busy, mute, torn, half, hung, stuck, late or packed."""

    def __init__(self, name):
        self.name, self.mood, self.asked, self.gone = name, "well", [], 0
        self.seen = []  # requests of other paths
        self.more = {}  # fields of answers
        self.packed = gzip.compress(name.encode() * 99)
        self.going_on = threading.Event()  # until then, a server that hangs hangs

    def app(self):
        paths = ["/v1/completions", "/v1/chat/completions", "/tokenize"]
        paths += ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/tokenize"]
        routes = [Route(path, self._answer, methods=["POST"]) for path in paths]
        return Starlette(
            routes=[
                *routes,
                Route("/health", self._health),
                Route("/v1/models", self._health),
                Route("/{path:path}", self._other, methods=["GET", "POST", "PUT", "DELETE"]),
            ]
        )

    async def _health(self, request):
        if self.mood in ("hung", "stuck"):
            await asyncio.to_thread(self.going_on.wait, 30)
        return JSONResponse({"name": self.name})

    async def _other(self, request):
        self.seen.append(request.url.path)
        if self.mood == "refusing":
            return JSONResponse({"error": {"message": "no such thing"}}, 400)
        query = f"?{request.url.query}" if request.url.query else ""
        target = request.scope["raw_path"].decode().partition("?")[0] + query
        size = len(await request.body())
        said = {"name": self.name, "method": request.method, "target": target, "size": size}
        return JSONResponse(said)

    async def _answer(self, request):
        try:
            document = json.loads(await request.body())
        except UnicodeDecodeError:
            return await self._other(request)
        self.asked.append((request.url.path, document, dict(request.headers)))
        if request.url.path == "/tokenize":
            return JSONResponse({"tokens": list(document["prompt"].encode())})
        if request.url.path == "/v1/messages/tokenize":
            return JSONResponse({"tokens": list(document["messages"][0]["content"].encode())})
        if self.mood == "busy":
            return JSONResponse({"error": {"message": self.name}}, 429, {"Retry-After": "1"})
        if self.mood == "refusing":
            return JSONResponse({"error": {"message": "no such thing"}}, 400)
        if self.mood == "packed":
            answer = Response(self.packed, headers={"content-encoding": "gzip"})
            answer.headers.append("set-cookie", "a=1; Path=/")
            answer.headers.append("set-cookie", "b=2")
            return answer
        if self.mood == "late":
            await asyncio.sleep(2.5)
        if self.mood == "half":
            return StreamingResponse(self._stream(), headers={"content-length": "100"})
        if self.mood == "hung":
            await asyncio.to_thread(self.going_on.wait, 30)
        if self.mood == "mute":  # not a byte of an answer comes
            request.receive.__self__.transport.abort()  # uvicorn's own
            return Response()
        if not document.get("stream"):
            return JSONResponse({"name": self.name} | self.more)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self):
        try:
            yield f"data: {json.dumps({'name': self.name} | self.more)}\n\n".encode()
            if self.mood == "stuck":
                await asyncio.to_thread(self.going_on.wait, 30)
            if self.mood in ("torn", "half"):
                yield b'data: {"half": '
                await asyncio.sleep(0.05)
                raise ConnectionError
            while self.mood == "slow":
                yield b": on\n\n"
                await asyncio.sleep(0.01)
            yield b"data: [DONE]\n\n"
        finally:
            self.gone += 1


class Router:
    """A router that runs: its `url`, its `proxy`, and requests to it."""

    def __init__(self, url, proxy):
        self.url, self.proxy = url, proxy

    def ask(self, prompt="Once", path="/v1/completions", headers=None, params=None, **more):
        document = ({"prompt": prompt} if isinstance(prompt, str | list) else prompt) | more
        return plain_http.post(
            f"{self.url}{path}", json=document, headers=headers, params=params, timeout=60
        )

    def well(self, *which):
        wait_for(lambda: [each.is_well for each in self.proxy.upstreams] == list(which))

    def idle(self):
        wait_for(lambda: not any(each.num_inflight for each in self.proxy.upstreams))


@contextmanager
def routed(urls, router=None, prefixes=None, keys=None, **more):
    prefixes = prefixes or SentPrefixes(1 << 12)
    listing = urls if isinstance(urls, UpstreamList) else UpstreamList([*map(Listed, urls)])
    limits = ProxyLimits(**more)
    proxy = Proxy(listing, router or PrefixAware(4.0), prefixes, keys or ApiKeys(), limits)
    with served(with_cors(proxy.app(), proxy.keys.origins)) as url:
        try:
            yield Router(url, proxy)
        finally:
            prefixes.close()
