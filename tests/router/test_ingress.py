"""The ingress before replicas on Ray Serve: answers passed on, and replicas that die."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from upstream_help import served, wait_for

import plain_http

pytest.importorskip("ray.serve", reason="install it with: pip install 'ray[serve]'")

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from quire.web.clients import HOME, EventStream
from quire.web.keys import ApiKeys
from quire_router.figures import merged
from quire_router.replicas import ATTEMPTS, MADE_BY, Ingress, Opened, ServedReplica
from quire_router.sent import home_of

TEXT = "A prompt that some replica has answered before."
METRICS = """# HELP quire_requests_total Requests.
# TYPE quire_requests_total counter
quire_requests_total{pool="a"} 3.0
# HELP quire_blocks Blocks.
# TYPE quire_blocks gauge
quire_blocks 7.0
"""


class Handle:
    """A handle of Ray Serve to one replica; `moods` are what its next calls come to: well, dead, torn or full."""

    def __init__(self):
        self.replica = ServedReplica.__new__(ServedReplica)
        self.replica._opened = Opened(self._app(), lambda: self.is_well)
        self.replica._name, self.is_well = "one", True
        self.replica._held = SimpleNamespace(close=lambda: None)
        self.replica._life = None
        self.moods, self.sent, self.num_open, self.num_begun = [], [], 0, 0
        self.answer = self

    def options(self, *, stream):
        assert stream
        return self

    def remote(self, sent):
        self.sent.append(sent)
        mood = self.moods.pop(0) if self.moods and sent.prompt else "well"
        return Messages(self, sent, mood)

    def broadcast(self, method, sent, name):
        """Ask this replica and one that has died, as Ray Serve asks all there are."""
        assert method == "told"

        async def results(*, timeout_s, return_exceptions):
            assert return_exceptions
            if self.moods and self.moods.pop(0) == "slow":
                raise TimeoutError
            return [await self.replica.told(sent, name), RayActorError()]

        return SimpleNamespace(results_async=results)

    def _app(self):
        async def answered(request):
            document = json.loads(await request.body())
            if document.get("stream"):
                return EventStream(self._stream(document), 20.0)
            return JSONResponse({"asked": document, "by": request.headers.get("authorization")})

        async def tokens(request):
            document = json.loads(await request.body())
            said = (
                document.get("prompt") or document.get("input") or json.dumps(document["messages"])
            )
            return JSONResponse({"tokens": list(said.encode())})

        async def home(request):
            return JSONResponse(request.headers.getlist(HOME))

        async def well(request):
            return PlainTextResponse("")

        async def failing(request):
            raise RuntimeError

        async def state(request):
            if request.method == "POST":
                return JSONResponse(await request.json() | {"query": request.url.query}, 201)
            stats = {"prompt_tokens": 10, "hit_tokens": 4}
            rest = {"model": "m", "inflight": 2, "groups": [], "tiers": [], "samples": [1]}
            return JSONResponse(rest | {"stats": stats})

        async def metrics(request):
            return PlainTextResponse(METRICS)

        @asynccontextmanager
        async def life(_):
            self.num_begun += 1
            yield

        return Starlette(
            lifespan=life,
            routes=[
                Route("/metrics", metrics),
                Route("/v1/cache", state),
                Route("/v1/cache/pin", state, methods=["POST"]),
                Route("/v1/completions", answered, methods=["POST"]),
                Route("/v1/chat/completions", answered, methods=["POST"]),
                Route("/v1/messages", answered, methods=["POST"]),
                Route("/tokenize", tokens, methods=["POST"]),
                Route("/v1/messages/tokenize", tokens, methods=["POST"]),
                Route("/v1/responses/tokenize", tokens, methods=["POST"]),
                Route("/v1/responses", answered, methods=["POST"]),
                Route("/v1/responses/{name}", home, methods=["GET", "DELETE"]),
                Route("/v1/models", failing),
                Route("/health", well),
                Route("/ping", well),
            ],
        )

    async def _stream(self, document):
        self.num_open += 1
        try:
            yield b'data: {"at": 0}\n\ndata: {"at"'
            yield b": 1}\n\n"
            while document["prompt"] == "on and on":
                yield b": on\n\n"
                await asyncio.sleep(0.01)
            yield b"data: [DONE]\n\n"
        finally:
            self.num_open -= 1


class Messages:
    """The messages of a call, until it is cancelled."""

    def __init__(self, handle, sent, mood):
        self._mood, self._told, self._cancelled = mood, 0, asyncio.Event()
        self._messages = handle.replica.answer(sent)

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._mood == "full":
            raise BackPressureError(8, 8)
        if self._mood == "dead" or (self._mood == "torn" and self._told == 2):
            await self._messages.aclose()
            raise RayActorError
        self._told += 1
        return await anext(self._messages)

    def cancel(self):
        self._closing = asyncio.ensure_future(self._messages.aclose())


@pytest.fixture
def front():
    yield from opened()


def opened(keys=None, **options):
    handle = Handle()
    options = {"sees_prefix": True, "max_body": 1 << 12} | options
    ingress = Ingress(handle, keys or ApiKeys(), **options)
    with served(ingress.__serve_build_asgi_app__()) as url:
        yield SimpleNamespace(
            handle=handle,
            ask=lambda prompt=TEXT, **more: plain_http.post(
                f"{url}/v1/completions", json={"prompt": prompt} | more, timeout=20
            ),
            url=url,
        )
    assert handle.num_open == 0


def test_pages_of_allowed_sites_may_ask():
    page = "https://chat.example"
    for front in opened(ApiKeys(origins=[page])):
        for more in ({}, {"stream": True}):
            answer = plain_http.post(
                f"{front.url}/v1/completions",
                json={"prompt": TEXT, **more},
                headers={"origin": page},
            )
            assert answer.headers["access-control-allow-origin"] == page


def lines(answer):
    return [line for line in answer.text.splitlines() if line.startswith("data: ")]


def test_answers_and_streams_are_those_of_the_replica_and_say_whose(front):
    answer = front.ask(max_tokens=3)
    assert answer.json()["asked"] == {"prompt": TEXT, "max_tokens": 3}
    assert (answer.status_code, answer.headers[MADE_BY]) == (200, "one")
    streamed = front.ask(stream=True)
    assert lines(streamed) == ['data: {"at": 0}', 'data: {"at": 1}', "data: [DONE]"]
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers[MADE_BY] == "one"


def test_the_router_is_told_tokens_salt_tenant_and_session(front):
    front.ask(cache_salt="s", session_id="mine")
    front.ask([1, 2, 3], user="u")
    talk = {"messages": [{"role": "user", "content": "hi"}]}
    plain_http.post(f"{front.url}/v1/chat/completions", json=talk, timeout=20)
    plain_http.post(f"{front.url}/v1/completions", content=b"no json", timeout=20)
    message = talk | {"metadata": {"user_id": "m"}}
    plain_http.post(f"{front.url}/v1/messages", json=message, timeout=20)
    told = [sent.prompt for sent in front.handle.sent if "tokenize" not in sent.scope["path"]]
    assert told[0].tokens.tolist() == list(TEXT.encode())
    assert told[0][1:] == ("s", None, "mine", None)
    assert told[1].tokens.tolist() == [1, 2, 3]
    assert told[1][1:] == (None, None, "u", None)
    assert told[2].tokens.tolist() == list(json.dumps(talk["messages"]).encode())
    assert told[3] is None
    assert told[4].tokens.tolist() == told[2].tokens.tolist()
    assert told[4].session == "m"
    assert front.handle.sent[-2].scope["path"] == "/v1/messages/tokenize"


def test_a_replica_is_asked_for_the_tokens_of_a_prompt_as_the_request_lays_it_out(front):
    tool = {"type": "function", "function": {"name": "f"}}
    talk = {"messages": [{"role": "user", "content": "hi"}], "model": "sql", "tools": [tool]}
    talk |= {"tool_choice": "none", "chat_template_kwargs": {"thinking": False}}
    more = {"max_tokens": 3, "stream": False, "unknown": 1}
    plain_http.post(f"{front.url}/v1/chat/completions", json=talk | more, timeout=20)
    asked, sent = front.handle.sent
    assert asked.scope["path"] == "/tokenize"
    assert json.loads(asked.body) == talk
    assert sent.prompt.model == "sql"


def test_a_request_that_names_a_response_has_the_home_of_its_replica(front):
    url, name = f"{front.url}/v1/responses", f"resp_{home_of('one')}_1"
    for document in ({"input": TEXT}, {"input": TEXT, "previous_response_id": name}):
        plain_http.post(url, json=document, timeout=20)
    plain_http.delete(f"{url}/{name}", timeout=20)
    own = plain_http.get(f"{url}/{name}", headers={HOME: "01234567"}, timeout=20).json()
    assert own == [home_of("one")]  # which no client may choose
    sent = [each for each in front.handle.sent if "tokenize" not in each.scope["path"]]
    assert [each.home for each in sent] == [None, *[home_of("one")] * 3]
    assert sent[0].prompt.tokens.tolist() == list(TEXT.encode())
    assert sent[1].scope["path"] == "/v1/responses"


def test_whether_replicas_are_well_is_told_without_a_key():
    for front in opened(ApiKeys([("ann", "key-of-ann")])):
        for path in ("/health", "/ping"):
            assert plain_http.get(front.url + path).status_code == 200
        assert plain_http.get(f"{front.url}/v1/models").status_code == 401


def test_the_ingress_reads_no_prompt_that_no_router_uses():
    for front in opened(sees_prefix=False):
        assert front.ask(user="u").status_code == 200
        assert [sent.prompt for sent in front.handle.sent] == [(None, None, None, "u", None)]


def test_a_replica_that_dies_before_its_answer_has_begun_is_passed_over(front):
    for stream in (False, True):
        front.handle.moods = ["dead"] * (ATTEMPTS - 1)
        assert front.ask(stream=stream).status_code == 200
    front.handle.moods = ["torn"]  # half of an answer that is not streamed
    assert front.ask().json()["asked"]["prompt"] == TEXT
    front.handle.moods = ["dead"] * ATTEMPTS
    answer = front.ask()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
    assert answer.headers["retry-after"] == "1"
    assert front.ask().status_code == 200


def test_a_replica_that_dies_in_a_stream_ends_it_with_an_error(front):
    front.handle.moods = ["torn"]
    told = lines(front.ask(stream=True))
    assert told[0] == 'data: {"at": 0}'
    assert json.loads(told[-2][6:])["error"]["code"] == "broken_off"
    assert told[-1] == "data: [DONE]"
    assert lines(front.ask(stream=True))[-1] == "data: [DONE]"


def test_clients_are_told_to_come_back_when_all_replicas_are_full(front):
    front.handle.moods = ["full"]
    answer = front.ask()
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")


def test_a_client_that_goes_ends_its_request_at_the_replica(front):
    asked = {"prompt": "on and on", "stream": True}
    with plain_http.stream("POST", f"{front.url}/v1/completions", json=asked) as answer:
        lines_ = answer.iter_lines()  # one that is forgotten closes the answer
        next(lines_)
        assert front.handle.num_open == 1
    wait_for(lambda: front.handle.num_open == 0)


def test_an_error_of_the_application_is_answered_and_the_next_request_served(front):
    assert plain_http.get(f"{front.url}/v1/models").status_code == 500
    assert front.ask("x" * (1 << 12)).status_code == 413
    assert front.ask().status_code == 200


def test_keys_are_asked_for_and_passed_on():
    for front in opened(ApiKeys([("ann", "key-of-ann")])):
        assert front.ask().status_code == 401
        assert front.handle.sent == []
        key = {"authorization": "Bearer key-of-ann"}
        answer = plain_http.post(f"{front.url}/v1/completions", json={"prompt": TEXT}, headers=key)
        assert answer.json()["by"] == "Bearer key-of-ann"
        assert front.handle.sent[-1].prompt.tenant == "ann"
        assert [sent.scope["path"] for sent in front.handle.sent] == [
            "/tokenize",
            "/v1/completions",
        ]


def test_the_operator_sees_each_replica_and_all_together(front):
    listed = plain_http.get(f"{front.url}/v1/replicas").json()["replicas"]
    assert [(each["replica"], each["page"]) for each in listed] == [("one", "replicas/one/")]
    assert listed[0]["stats"] == {"prompt_tokens": 10, "hit_tokens": 4}
    said = plain_http.get(f"{front.url}/metrics").text.splitlines()
    assert 'quire_requests_total{pool="a",replica="one"} 3.0' in said
    assert said.count("# TYPE quire_blocks gauge") == 1
    assert "v1/replicas" in plain_http.get(front.url).text
    assert plain_http.get(f"{front.url}/replicas/one/v1/cache").json()["samples"] == [1]
    pin = plain_http.post(f"{front.url}/replicas/one/v1/cache/pin?a=b", json={"ttl_s": 5})
    assert (pin.status_code, pin.json()) == (201, {"ttl_s": 5, "query": "a=b"})
    assert front.handle.num_begun == 1


def test_metrics_of_several_replicas_are_one_text():
    said = merged({"a": METRICS, "b": METRICS}).decode().splitlines()
    assert said.count("# TYPE quire_requests_total counter") == 1
    assert [line for line in said if line.startswith("quire_blocks")] == [
        'quire_blocks{replica="a"} 7.0',
        'quire_blocks{replica="b"} 7.0',
    ]


def test_unknown_replicas_and_callers_without_the_operators_key_are_refused(front):
    url = f"{front.url}/replicas"
    assert plain_http.get(f"{url}/two/metrics").status_code == 404
    assert plain_http.post(f"{url}/one/v1/completions", json={"prompt": TEXT}).status_code == 404
    front.handle.moods = ["slow"]
    late = plain_http.get(f"{front.url}/metrics")
    assert (late.status_code, late.headers["retry-after"]) == (503, "1")
    for other in opened(ApiKeys([("ann", "key-of-ann")])):
        for path in ("", "/metrics", "/v1/replicas", "/replicas/one/"):
            assert plain_http.get(other.url + path).status_code == 403
        assert other.handle.num_begun == 0


def test_an_engine_that_broke_down_is_told_to_ray():
    handle = Handle()
    handle.replica.check_health()
    handle.is_well = False
    with pytest.raises(RuntimeError, match="takes nothing"):
        handle.replica.check_health()
