"""Spans of requests through the router, as OpenTelemetry's own library records them."""

import time

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from test_route_command import said, started
from upstream_help import FakeUpstream, routed, served, wait_for

import plain_http
from quire.errors import ConfigError
from quire.web.keys import ApiKeys
from quire_router.rates import KeyLimits, RateLimits
from quire_router.relay import MADE_BY
from quire_router.spans import Spans, exported_to

pytest.importorskip("opentelemetry.sdk", reason="no opentelemetry-sdk is installed")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE, PARENT = "a" * 32, "b" * 16
TOLD = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=1", "baggage": "c=2"}


@pytest.fixture
def traced():
    """Two servers, a router that records spans, and the exporter that has them."""
    fakes = FakeUpstream("one"), FakeUpstream("two")
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with served(fakes[0].app()) as one, served(fakes[1].app()) as two, routed([one, two]) as router:
        router.proxy.spans = Spans(provider)
        router.well(True, True)
        yield router, fakes, exporter
    router.proxy.spans.close()


def spans_of(exporter, count=1):
    wait_for(lambda: len(exporter.get_finished_spans()) >= count)
    return exporter.get_finished_spans()


def hexed(number, digits):
    return f"{number:0{digits}x}"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_a_span_below_its_clients_and_above_its_servers(traced, stream):
    router, fakes, exporter = traced
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 6},
    }
    fakes[0].more = fakes[1].more = {"usage": usage}
    answer = router.ask(headers=TOLD, stream=stream, model="m")
    (span,) = spans_of(exporter)
    assert (hexed(span.context.trace_id, 32), hexed(span.parent.span_id, 16)) == (TRACE, PARENT)
    at = int(answer.headers[MADE_BY])
    assert dict(span.attributes) == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "gen_ai.request.model": "m",
        "http.response.status_code": 200,
        "quire.upstream": router.proxy.upstreams[at].name,
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 6,
    }
    assert (span.name, span.kind.name) == ("POST /v1/completions", "SERVER")
    got = fakes[at].asked[-1][2]
    assert got["traceparent"] == f"00-{TRACE}-{hexed(span.context.span_id, 16)}-01"
    assert (got["tracestate"], got["baggage"]) == ("a=1", "c=2")


def test_a_request_without_a_parent_begins_a_trace(traced):
    router, fakes, exporter = traced
    at = int(router.ask().headers[MADE_BY])
    (span,) = spans_of(exporter)
    assert span.parent is None
    assert hexed(span.context.trace_id, 32) in fakes[at].asked[-1][2]["traceparent"]


def test_a_request_that_is_not_sampled_is_passed_on_as_such(traced):
    router, fakes, exporter = traced
    at = int(router.ask(headers={"traceparent": f"00-{TRACE}-{PARENT}-00"}).headers[MADE_BY])
    assert fakes[at].asked[-1][2]["traceparent"].endswith("-00")
    assert exporter.get_finished_spans() == ()


def test_errors_are_told_in_spans(traced):
    router, fakes, exporter = traced
    fakes[0].mood = fakes[1].mood = "mute"
    assert router.ask().status_code == 502
    router.proxy.rates = RateLimits({"*": KeyLimits(rpm=1)}, time.monotonic)
    fakes[0].mood = fakes[1].mood = "torn"
    router.well(True, True)
    assert router.ask(stream=True).status_code == 200
    assert router.ask().status_code == 429
    told = [(s.attributes["http.response.status_code"], s.status.status_code.name) for s in spans_of(exporter, 3)]  # fmt: skip
    assert told == [(502, "ERROR"), (200, "UNSET"), (429, "ERROR")]
    assert exporter.get_finished_spans()[2].attributes["error.type"] == "rate_limit_exceeded"


def test_a_span_of_a_stream_ends_when_its_client_goes(traced):
    router, fakes, exporter = traced
    fakes[0].mood = fakes[1].mood = "slow"
    with plain_http.stream("POST", f"{router.url}/v1/completions", json={"stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert exporter.get_finished_spans() == ()
    spans_of(exporter)
    router.idle()


def test_requests_without_a_key_have_no_span():
    fake, provider, exporter = FakeUpstream("one"), TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    keys = ApiKeys([("ann", "key-of-ann")])
    with served(fake.app()) as url, routed([url], keys=keys) as router:
        router.proxy.spans = Spans(provider)
        router.well(True)
        assert router.ask().status_code == 401
        assert exporter.get_finished_spans() == ()


def test_an_endpoint_needs_the_exporter_and_an_address(monkeypatch):
    monkeypatch.setattr("quire_router.spans._is_there", lambda module: "exporter" not in module)
    with pytest.raises(
        ConfigError, match="needs opentelemetry-exporter-otlp-proto-http: pip install"
    ):
        exported_to("http://127.0.0.1:4318/v1/traces")
    monkeypatch.setattr("quire_router.spans._is_there", lambda module: True)
    with pytest.raises(ConfigError, match="got 'localhost:4318'"):
        exported_to("localhost:4318")


@pytest.fixture
def collected():
    """A collector: its URL, and the exports that came, each with its headers."""
    trace_service = pytest.importorskip(
        "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
        reason="no opentelemetry-proto is installed",
    )
    came = []

    async def export(request):
        body = await request.body()
        came.append((trace_service.ExportTraceServiceRequest.FromString(body), request.headers))
        return Response(media_type="application/x-protobuf")

    with served(Starlette(routes=[Route("/v1/traces", export, methods=["POST"])])) as url:
        yield f"{url}/v1/traces", came


@pytest.mark.ci
def test_the_command_sends_its_spans_to_a_collector(collected, monkeypatch):
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http",
        reason="no opentelemetry-exporter-otlp-proto-http is installed",
    )
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=ann")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    endpoint, came = collected
    fake = FakeUpstream("one")
    fake.more = {"timings": {"cache_n": 6, "prompt_n": 3, "predicted_n": 4}}
    route = ("--otlp-traces-endpoint", endpoint)
    with served(fake.app()) as url, started("route", "--upstream", url, *route) as process:
        address = said(process)["url"]
        wait_for(lambda: plain_http.get(f"{address}/health").status_code == 200)
        for stream in (False, True):
            asked = {"prompt": "Once", "stream": stream}
            plain_http.post(f"{address}/v1/completions", json=asked, headers=TOLD, timeout=20)
        process.terminate()  # what is left is exported at the end
        assert process.wait(20) == 0, process.stderr.read()
    names = {each.key: each.value for export, _ in came for at in export.resource_spans for each in at.resource.attributes}  # fmt: skip
    assert names["service.name"].string_value == "front"
    assert {headers["x-tenant"] for _, headers in came} == {"ann"}
    spans = [span for export, _ in came for at in export.resource_spans for scope in at.scope_spans for span in scope.spans]  # fmt: skip
    assert [(span.trace_id.hex(), span.parent_span_id.hex()) for span in spans] == [(TRACE, PARENT)] * 2  # fmt: skip
    sent = [each[2]["traceparent"] for each in fake.asked]
    assert sent == [f"00-{TRACE}-{span.span_id.hex()}-01" for span in spans]
    for span in spans:
        told = {each.key: each.value for each in span.attributes}
        assert told["quire.upstream"].string_value == url
        assert told["gen_ai.usage.cache_read.input_tokens"].int_value == 6
