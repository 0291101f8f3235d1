"""The OpenAPI document of a server: requests from the structs that read them, answers by their main fields."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, defstruct

from quire._version import __version__
from quire.config import MAX_SECONDS
from quire.core.terms import MAX_WITHIN
from quire.engines.loop import SamplingParams
from quire.serve.fields import ELSEWHERE
from quire.web.errors import MESSAGES

Json: TypeAlias = dict[str, Any]
Made: TypeAlias = tuple[str, str, Any, Any]
"""A route: method, path, the struct of its body (None: it has none), and what answers."""

REF = "#/components/schemas/{name}"

_OWN = {"best_of", "logprobs", "n", "prompt_logprobs", "stop", "structured_outputs"}
"""Fields whose limits are closer here than those of the engine."""


def _shape(name: str, **fields: Any) -> Any:
    """Return the type of an answer, of which these fields are told."""
    return defstruct(name, list(fields.items()))


_Any = dict[str, Any]
_Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
_Factor = Annotated[float, Meta(ge=1, le=MAX_WITHIN)]
_Later = _shape("Later", deadline_s=Annotated[float, Meta(gt=0)], retain_s=_Seconds, returns_in_s=_Seconds, ttl_s=_Seconds, within=_Factor)  # fmt: skip
"""Limits of fields that are checked once they are read, beside those of `SamplingParams`."""

_Ended: Any = Literal["stop", "length", "tool_calls", "abort", "error"] | None
_TOKENS: Json = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), int)
_HEAD: Json = {"id": str, "created": int, "model": str, "system_fingerprint": str}
_Cached = _shape("CachedTokens", cached_tokens=int)
_HEAD["usage"] = _shape("Usage", **_TOKENS, prompt_tokens_details=_Cached)
_CHOICE: Json = {"index": int, "logprobs": _Any | None, "finish_reason": _Ended}
_Text = _shape("CompletionChoice", **_CHOICE, text=str)
_Said = _shape("AnsweredMessage", role=Literal["assistant"], content=str | None)
_Choice = _shape("ChatChoice", **_CHOICE, message=_Said)
_Completion = _shape("Completion", **_HEAD, object=Literal["text_completion"], choices=list[_Text])
_Chat = _shape("ChatCompletion", **_HEAD, object=Literal["chat.completion"], choices=list[_Choice])
_Message = _shape("Message", id=str, type=Literal["message"], role=Literal["assistant"], model=str, content=list[_Any],
                  stop_reason=str | None, stop_sequence=str | None, usage=dict[str, int])  # fmt: skip
_Status = Literal["completed", "incomplete", "failed", "in_progress"]
_Response = _shape("Response", id=str, object=Literal["response"], created_at=int, model=str, status=_Status,
                   output=list[_Any], usage=_Any | None, error=_Any | None)  # fmt: skip
_Card = _shape("Model", id=str, object=Literal["model"], created=int, max_model_len=int)
_Tokens = _shape("Tokenized", count=int, max_model_len=int, tokens=list[int])
_Inner = _shape("ErrorObject", message=str, type=str, param=str | None, code=str | None)
_Error = _shape("Error", error=_Inner)
_MessageInner = _shape("MessageErrorObject", type=str, message=str)
_MessageError = _shape("MessageError", type=Literal["error"], error=_MessageInner, request_id=str)


class _AnswerKind(NamedTuple):
    """An answer: its type, or the media type of what is no JSON; whether it may be a stream of events."""

    body: Any
    streams: bool = False


_NOTHING = _AnswerKind(None)
_ANSWERS: Mapping[str, _AnswerKind] = {
    "POST /v1/completions": _AnswerKind(_Completion, streams=True),
    "POST /v1/chat/completions": _AnswerKind(_Chat, streams=True),
    "POST /v1/messages": _AnswerKind(_Message, streams=True),
    "POST /v1/messages/count_tokens": _AnswerKind(_shape("TokenCount", input_tokens=int)),
    "POST /v1/messages/tokenize": _AnswerKind(_Tokens),
    "POST /v1/responses": _AnswerKind(_Response, streams=True),
    "GET /v1/responses/{name}": _AnswerKind(_Response),
    "POST /v1/responses/input_tokens": _AnswerKind(_shape("InputTokens", object=str, input_tokens=int)),
    "POST /v1/responses/tokenize": _AnswerKind(_Tokens),
    "GET /v1/responses/{name}/input_items": _AnswerKind(_shape("Items", object=Literal["list"], data=list[_Any], has_more=bool)),
    "GET /v1/models": _AnswerKind(_shape("Models", object=Literal["list"], data=list[_Card])),
    "GET /v1/models/{name:path}": _AnswerKind(_Card),
    "GET /version": _AnswerKind(_shape("Version", version=str)),
    "POST /tokenize": _AnswerKind(_Tokens),
    "POST /detokenize": _AnswerKind(_shape("Detokenized", prompt=str)),
    "GET /": _AnswerKind("text/html"),
    "GET /metrics": _AnswerKind("text/plain"),
    "GET /health": _NOTHING,
    "GET /ping": _NOTHING,
    "POST /ping": _NOTHING,
}  # fmt: skip
"""Answers by route; those of others are objects."""

_QUERY: Mapping[str, Mapping[str, Json]] = {
    "GET /v1/cache": {"since": {"type": "number", "minimum": 0}},
    "GET /v1/cache/what-if": {"memory": {"type": "string", "pattern": r"^\d+(\.\d+)?(,\d+(\.\d+)?)*$"}},
    "GET /v1/responses/{name}": {"stream": {"enum": ["false"]}},
    "GET /v1/responses/{name}/input_items": {
        "limit": {"type": "integer", "minimum": 1, "maximum": 100},
        "order": {"enum": ["asc", "desc"]},
        "after": {"type": "string"},
    },
}  # fmt: skip


def document(
    open_to_all: Iterable[Made],
    for_clients: Iterable[Made],
    for_operators: Iterable[Made],
    *,
    has_keys: bool,
) -> Json:
    """Return the document of routes that anybody, clients and operators may ask."""
    keys: list[Json] = [{"bearer": []}, {"key": []}] if has_keys else []
    operator: list[Json] = [{"operator": []}, *keys] if has_keys else []
    needed = ((open_to_all, list[Json]()), (for_clients, keys), (for_operators, operator))
    made = [(each, needs) for routes, needs in needed for each in routes]
    bodies = {kind for (_, _, kind, _), _ in made if kind is not None}
    answers = {each.body for each in _ANSWERS.values() if isinstance(each.body, type)}
    types = sorted(
        {*bodies, *answers, SamplingParams, _Later, _Error, _MessageError},
        key=lambda each: each.__name__,
    )
    _, schemas = msgspec.json.schema_components(types, ref_template=REF)
    limits = schemas.pop("SamplingParams")["properties"] | schemas.pop("Later")["properties"]
    for kind in bodies:
        _as_it_is_read(schemas[kind.__name__], kind, limits)
    paths: dict[str, Json] = {}
    for (method, path, kind, _), needs in made:
        name = re.sub(r":\w+\}", "}", path)
        paths.setdefault(name, {})[method.lower()] = _operation(method, path, kind, needs)
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        "operator": {"type": "http", "scheme": "basic"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "quire serve", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": schemes},
    }


def _as_it_is_read(schema: Json, kind: Any, limits: Mapping[str, Json]) -> None:
    """Bring the schema of a body to what is read: without fields of other paths, with later limits; null is absent."""
    offered: dict[str, Json] = schema["properties"]
    for name in ELSEWHERE.get(kind, ()):
        del offered[name]
    for name, field in offered.items():
        if name in limits.keys() - _OWN and name not in schema["required"]:
            own = {key: value for key, value in limits[name].items() if key != "default"}
            closer = own.get("anyOf", [own])
            offered[name] = {"anyOf": [*closer, {"type": "null"}], "default": field.get("default")}
        elif name not in schema["required"] and {"type": "null"} not in field.get("anyOf", ()):
            rest = {key: value for key, value in field.items() if key != "default"}
            offered[name] = {"anyOf": [rest, {"type": "null"}], "default": field["default"]}


def _operation(method: str, path: str, kind: Any, needs: Sequence[Json]) -> Json:
    """Return what the document says of a route."""
    route = f"{method} {path}"
    answer = _ANSWERS.get(route, _AnswerKind(_Any))
    error = _MessageError if path.startswith(MESSAGES) else _Error
    content = {}
    if isinstance(answer.body, str):
        content = {answer.body: {"schema": {"type": "string"}}}
    elif answer.body is not None:
        content = {"application/json": {"schema": _schema(answer.body)}}
    if answer.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    ignored = {"schema": {"type": "string"}, "description": "Unknown fields of the request."}
    said: Json = {"description": "the answer", "content": content}
    if kind is not None:
        said["headers"] = {"X-Quire-Ignored": ignored}
    refused = {
        "description": "an error",
        "content": {"application/json": {"schema": _schema(error)}},
    }
    if answer is _NOTHING:
        said, refused = {"description": "it takes requests"}, {"description": "it takes none"}
    names = re.findall(r"\{(\w+)(:int)?", path)
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "integer" if number else "string"},
        }
        for name, number in names
    ]
    asked = _QUERY.get(route, {})
    parameters += [{"name": name, "in": "query", "schema": asked[name]} for name in asked]
    made: Json = {
        "operationId": "_".join(re.findall(r"[a-z]\w*", f"{method.lower()} {path}")),
        "parameters": parameters,
        "responses": {"200": said, "4XX": refused, "5XX": refused},
        "security": needs,
    }
    if kind is not None:
        body = {"application/json": {"schema": _schema(kind)}}
        made |= {
            "summary": kind.__doc__.partition(":")[0],
            "requestBody": {"required": True, "content": body},
        }
    return made


def _schema(kind: Any) -> Json:
    if kind is _Any:
        return {"type": "object"}
    return {"$ref": REF.format(name=kind.__name__)}
