"""Bodies of requests: bounded in size and time, and read as structs that check themselves."""

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from msgspec import Raw
from starlette.requests import Request

from quire.errors import QuireError
from quire.web.errors import ApiError

SEEN = 60
"""Characters of a refused value that an error shows."""

Body = TypeVar("Body")


async def body_of(request: Request, limit: int, slow_s: float) -> bytes:
    """Return a request's body. Raises `ApiError` for one of more bytes than `limit`, or slower than `slow_s`.

    One whose head says that it has more is refused before it comes.
    """
    body = bytearray()
    too_long = ApiError(413, f"the body has more than {limit} bytes, the limit; send less")
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said) > limit:
        raise too_long
    try:
        async with asyncio.timeout(slow_s):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, f"the body did not come in {slow_s:g} seconds") from None
    return bytes(body)


def read(kind: type[Body], body: bytes) -> Body:
    """Return a JSON body as a struct; a null in a field that takes none means absent.

    Raises `ApiError` with field, value and expected type, and the `QuireError` of a struct that checks itself.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, QuireError):
            raise error.__cause__ from None
        said, _, path = str(error).partition(" - at `$")
        if said.endswith("got `null`") and (rest := _without(body, path.rstrip("`"))):
            return read(kind, rest)
        param = path.rstrip("`").lstrip(".") or None
        said = f"{param or 'the body'}: {said}, got {_value_at(body, path)}"
        raise ApiError(400, said, param=param) from None
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None


def _without(body: bytes, path: str) -> bytes | None:
    """Return a document without the field at a path of names; None where it is none, or is malformed behind that."""
    *parents, name = path.split(".")[1:] or [""]
    try:
        document: Any = msgspec.json.decode(body)
        held = document
        for each in parents:
            held = held[each]
        del held[name]
    except (LookupError, TypeError, msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    return msgspec.json.encode(document)


def _value_at(body: bytes, path: str) -> str:
    """Return what stands at a path of a document, as it was sent, cut."""
    found = Raw(body)
    try:
        for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
            kind: Any = dict[str, Raw] if name else list[Raw]
            found = msgspec.json.decode(found, type=kind)[name or int(index)]
    except (msgspec.DecodeError, RecursionError, LookupError):
        return "what cannot be shown"
    text = bytes(found).decode("utf-8", "replace")
    return text if len(text) <= SEEN else text[:SEEN] + "..."
