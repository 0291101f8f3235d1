"""The OpenAPI document that a server serves, and requests drawn from it: no 500, answers as it says, nothing held."""

import json
import random
import re
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import jsonschema
import openapi_spec_validator
import pytest
from serve_help import fixtures, running

import plain_http
from quire.serve.app import make_app
from quire.serve.fields import ELSEWHERE, REFUSED
from quire.serve.protocol import ChatRequest, CompletionRequest
from quire.serve.service import Bounds
from quire.web.keys import ApiKeys

server, nothing_stays = fixtures(max_model_len=160, bounds=Bounds(max_body=1 << 16, slow_s=2.0))


@pytest.fixture(scope="module")
def document(server):
    return server.get("/openapi.json").json()


def properties(document, name):
    return document["components"]["schemas"][name]["properties"]


def test_the_document_is_valid_and_has_every_route(server, document):
    openapi_spec_validator.validate(document)
    routes = {
        (method.lower(), re.sub(r":\w+\}", "}", each.path))
        for each in make_app(server.service).routes
        for method in each.methods - {"HEAD"}
    }
    described = {(method, path) for path, item in document["paths"].items() for method in item}
    assert routes == described | {("get", "/openapi.json")}


def test_the_document_has_the_fields_that_a_path_offers(document):
    for kind in (CompletionRequest, ChatRequest):
        offered = {*kind.__struct_encode_fields__} - ELSEWHERE[kind]
        assert properties(document, kind.__name__).keys() == offered
        assert not offered & (REFUSED.keys() - {*kind.__struct_encode_fields__})
    assert "reasoning" in properties(document, "ResponseRequest")
    assert "text" in properties(document, "ResponseRequest")  # by its name on the wire


def test_limits_that_are_checked_later_stand_in_the_document(server, document):
    offered = properties(document, "ChatRequest")
    assert offered["top_p"] == {
        "anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 1}, {"type": "null"}],
        "default": None,
    }
    base = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "ttl_s", "deadline_s", "within", "seed"):  # fmt: skip
        limits = offered[name]["anyOf"][0]
        for key, step in (("minimum", -1), ("exclusiveMinimum", 0), ("maximum", 1)):
            if key in limits:
                asked = base | {name: limits[key] + step}
                assert server.post("/v1/chat/completions", asked).status_code == 400, (name, key)
        assert {"minimum", "exclusiveMinimum"} & limits.keys(), name


def test_null_means_absent_in_the_document_too(server, document):
    for name, field in properties(document, "ChatRequest").items():
        assert {"type": "null"} in field["anyOf"], name
    asked = dict.fromkeys(properties(document, "CompletionRequest")) | {"prompt": "A list"}
    assert server.post("/v1/completions", asked | {"max_tokens": 1}).status_code == 200


def test_the_document_needs_no_key_and_says_which_paths_need_one():
    with running(keys=ApiKeys([("ann", "key-of-ann")])) as other:
        paths = other.get("/openapi.json").json()["paths"]
    assert paths["/v1/models"]["get"]["security"] == [{"bearer": []}, {"key": []}]
    assert {"operator": []} in paths["/metrics"]["get"]["security"]
    assert paths["/health"]["get"]["security"] == []


# -- requests drawn from the document ------------------------------------------------------

ODD = [None, True, -1, 0, 2**70, -1e308, 1e-9, "", "\x00", "\ud800", "a" * 3000, [], [[]], [None], {}, {"a": {"b": [1]}},
       [1, "a"], [1.0, 2.0], 3.0, {"5": 1}, [{"type": "text", "text": None}], [{"type": "image_url"}], "none", "auto", {"type": "function"}, {"type": "object"}, "root ::= root", "(", 10**9]  # fmt: skip

_SAID = [{"role": "user", "content": "What is a list?"}]
_CALL = {"function": {"name": "f", "parameters": {"type": "object"}}}
BASES = {
    "CompletionRequest": {"prompt": "A list", "max_tokens": 3},
    "ChatRequest": {"messages": _SAID, "max_tokens": 3},
    "MessageRequest": {"messages": _SAID, "max_tokens": 3},
    "MessagePrompt": {"messages": _SAID},
    "ResponseRequest": {"input": "What is a list?", "max_output_tokens": 3},
    "PromptRequest": {"prompt": "A list"},
    "CacheRequest": {"prompt": "A list"},
    "PinRequest": {"prompt": "A list", "ttl_s": 0.2},
    "EvictRequest": {"num_blocks": 1},
    "PurgeRequest": {"tenant": "ann"},
    "Detokenize": {"tokens": [3, 4]},
}


class Drawing:
    """Draws requests of a document: mostly valid ones with a few fields more, and odd values among them."""

    def __init__(self, document, seed):
        self.rng, self.schemas = random.Random(seed), document["components"]["schemas"]
        self.routes = [(m, p, o) for p, item in document["paths"].items() for m, o in item.items()]

    def value(self, schema, depth=0):
        rng = self.rng
        if rng.random() < 0.06 or depth > 6:
            return rng.choice(ODD)
        if "$ref" in schema:
            return self.struct(self.schemas[schema["$ref"].rpartition("/")[2]], depth)
        if "anyOf" in schema:
            return self.value(rng.choice(schema["anyOf"]), depth)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        match schema.get("type"):
            case "null" | None:
                return None
            case "boolean":
                return rng.random() < 0.5
            case "string":
                words = [
                    "A list",
                    "",
                    "user",
                    "assistant",
                    "f",
                    "none",
                    "required",
                    "[a-c]+",
                    'start: "a"',
                    "é🙂",
                    "text",
                ]
                return rng.choice(words)
            case "integer" | "number" as kind:
                low = schema.get("minimum", schema.get("exclusiveMinimum", -3))
                high = min(schema.get("maximum", schema.get("exclusiveMaximum", 9)), low + 40)
                drawn = rng.choice([low, high, rng.uniform(low, high)])
                if kind == "integer":  # which a whole float is
                    drawn = int(drawn) if rng.random() < 0.9 else float(int(drawn))
                return drawn
            case "array":
                return [
                    self.value(schema.get("items", {}), depth + 1)
                    for _ in range(rng.choice((0, 1, 1, 2)))
                ]
            case _ if "properties" in schema:
                return self.struct(schema, depth)
            case _:
                inner = schema.get("additionalProperties") or {}
                keys = rng.sample(["1", "7", "a", "type", "tools"], rng.choice((0, 1, 2)))
                return {key: self.value(inner, depth + 1) for key in keys}

    def struct(self, schema, depth):
        needed = schema.get("required", ())
        return {
            name: self.value(field, depth + 1)
            for name, field in schema.get("properties", {}).items()
            if name in needed or self.rng.random() < 0.12
        }

    def body(self, operation):
        """Return a body as bytes; None where there is none."""
        rng = self.rng
        if "requestBody" not in operation:
            return None
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition(
            "/"
        )[2]
        schema = self.schemas[name]
        if (chance := rng.random()) < 0.04:
            return rng.choice(
                [
                    b"",
                    b"{",
                    b"null",
                    b"[]",
                    b"\xff",
                    b'"a"',
                    b"[" * 3000,
                    b"{}",
                    b'{"a": 1e999}',
                    b"{" * 70000,
                ]
            )
        if chance < 0.2:
            return encoded(self.struct(schema, 0))
        made = dict(BASES[name])
        for key in rng.sample(
            [*schema["properties"]], min(rng.choice((0, 1, 1, 2, 3)), len(schema["properties"]))
        ):
            made[key] = self.value(schema["properties"][key])
        if rng.random() < 0.1:
            made[rng.choice(["odd", "echo", "tools", "lora", "a b", *schema["properties"]])] = (
                rng.choice(ODD)
            )
        return encoded(made)

    def request(self):
        method, path, operation = self.rng.choice(self.routes)
        if "requestBody" not in operation and self.rng.random() < 0.6:
            return self.request()
        name = self.rng.choice(
            ["quire-tiny", "1", "a%20b", "resp_1", "%00", "x" * 300, "..%2fx", "-1"]
        )
        query = {
            each["name"]: str(self.value(each["schema"]))
            for each in operation["parameters"]
            if each["in"] == "query"
        }
        query = {
            key: text
            for key, text in query.items()
            if "\ud800" not in text and self.rng.random() < 0.5
        }
        return method, re.sub(r"\{\w+\}", name, path), operation, query, self.body(operation)


def encoded(document):
    return json.dumps(document).encode()


def checked(document, asked, answer):
    """Fail unless an answer is as the document says."""
    operation, body = asked[2], asked[4]
    status, what = answer.status_code, (asked[:2], asked[3], body and body[:600], answer.text[:600])
    assert status != 500, what
    allowed = operation["responses"].get(str(status)) or operation["responses"].get(
        f"{status // 100}XX"
    )
    if status == 404 and not answer.content:
        return
    assert allowed is not None, what
    kind = answer.headers.get("content-type", "").partition(";")[0]
    assert not answer.content or kind in allowed.get("content", ()), what
    if kind == "application/json":
        schema = allowed["content"][kind]["schema"] | {"components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(answer.json())
    elif kind == "text/event-stream":
        for line in answer.text.splitlines():
            if line.startswith("data: ") and line != "data: [DONE]":
                assert "the server failed at this request" not in line, what
                json.loads(line[6:])


def dropped(server, asked, rng):
    """Send a request, or its beginning, and go."""
    method, path, _, _, body = asked
    host, port = server.url.removeprefix("http://").split(":")
    head = f"{method.upper()} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body or b'')}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection, suppress(OSError):
        connection.sendall((head.encode() + (body or b""))[: rng.choice((None, None, 60))])
        connection.settimeout(rng.choice((0.001, 0.01, 0.05)))
        connection.recv(rng.choice((1, 200)))


def drawn_requests(server, document, count, seed):
    """Ask `count` requests, some at once; return how many were answered with each status."""

    def some(number):
        drawing, statuses = Drawing(document, f"{seed} {number}"), []
        with plain_http.Client(base_url=server.url, timeout=60) as client:
            for _ in range(count // 4):
                asked = method, path, _, query, body = drawing.request()
                if drawing.rng.random() < 0.06:
                    dropped(server, asked, drawing.rng)
                    continue
                answer = client.request(method, path, params=query, content=body)
                checked(document, asked, answer)
                statuses.append(answer.status_code)
        return statuses

    with ThreadPoolExecutor(4) as threads:
        return [status for each in threads.map(some, range(4)) for status in each]


@pytest.mark.parametrize(
    ("count", "seed"),
    [
        pytest.param(400, 0, marks=pytest.mark.ci),
        pytest.param(10_000, 1, marks=pytest.mark.long),
    ],
)
def test_drawn_requests_get_answers_as_the_document_says_and_leave_nothing(server, document, count, seed):  # fmt: skip
    statuses = drawn_requests(server, document, count, seed)
    server.quiet()
    assert statuses.count(200) > len(statuses) / 4  # they reach what computes
    metrics = server.get("/metrics").text
    assert re.findall(r"^quire_requests_(?:running|waiting)\{.*\} ([\d.]+)", metrics, re.MULTILINE) == ["0.0", "0.0"]  # fmt: skip
    assert server.get("/v1/cache").json()["groups"][0]["active"] == 0


@pytest.mark.long
def test_schemathesis_finds_no_500_and_no_answer_that_the_document_does_not_have(server):
    command = shutil.which("schemathesis") or shutil.which(
        "schemathesis", path=Path(sys.executable).parent
    )
    if command is None:
        pytest.skip(
            "pip install schemathesis; it is no part of the environment, as it is loaded with each test"
        )
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance,negative_data_rejection"  # fmt: skip
    argv = [command, "run", f"{server.url}/openapi.json", "-n", "40", "--phases", "coverage,fuzzing", "--checks", checks,
            "--seed", "1", "--no-color", "--continue-on-failure", "--generation-database", "none"]  # fmt: skip
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    server.quiet()
