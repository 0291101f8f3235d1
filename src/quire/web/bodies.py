"""Bodies of requests: bounded in size and time, and read as structs that check themselves."""

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from msgspec import Raw
from starlette.requests import ClientDisconnect, Request

from quire.errors import QuireError
from quire.web.errors import ApiError
from quire.web.protocol import has_come

SEEN = 60
"""Characters of a refused value that an error shows."""

MENDED = 32 << 20
"""Bytes of one body that are read again for its nulls and whole floats."""

_STEPS = re.compile(r"\.(\w+)|\[(\d+)\]")
"""A name or an index in a path."""

Body = TypeVar("Body")


async def body_of(request: Request, limit: int, slow_s: float) -> bytes:
    """Return a request's body. Raises `ApiError` for one of more bytes than `limit`, or slower than `slow_s`.

    One whose head says that it has more is refused before it comes.
    """
    body = bytearray()
    too_long = ApiError(413, f"the body has more than {limit} bytes, the limit; send less")
    said = next(
        (value for name, value in request.scope["headers"] if name == b"content-length"), b""
    )
    if said.isdigit() and int(said) > limit:
        raise too_long
    is_whole = False
    try:
        async with asyncio.timeout(None if has_come(request.scope) else slow_s):
            while not is_whole:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                is_whole = not message.get("more_body", False)
                if len(body) > limit:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, f"the body did not come in {slow_s:g} seconds") from None
    return bytes(body)


def read(kind: type[Body], body: bytes) -> Body:
    """Return a JSON body as a struct.

    A null in a field that takes none means absent; a whole float is an integer, as JSON Schema has it.
    Raises `ApiError` with field, value and expected type, and the `QuireError` of a struct that checks itself.
    """
    left = MENDED
    while True:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, QuireError):
                raise error.__cause__ from None
            said, _, place = str(error).partition(" - at ")
            path = place.rpartition("`$")[2].rstrip("`")
            left -= len(body)
            if said.endswith(("got `null`", "got `float`")) and left >= 0:
                mended = _mended(body, path, said)
                if mended is not None:
                    body = mended
                    continue
            param, value = path.lstrip(".") or None, _value_at(body, path)
            said = f"{said}, got {value}"
            if said.startswith("Invalid enum value"):
                said = f"{value} is not offered; /openapi.json has the values that are"
            raise ApiError(400, f"{param or 'the body'}: {said}", param=param) from None
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise ApiError(400, f"the body is no JSON: {error}") from None


def _mended(body: bytes, path: str, said: str) -> bytes | None:
    """Return a document without the null at a path, or with an int for a whole float.

    None where neither is there or the document is malformed behind it.
    """
    *parents, last = [name or int(index) for name, index in _STEPS.findall(path)] or [""]
    try:
        document: Any = msgspec.json.decode(body)
        held = document
        for each in parents:
            held = held[each]
        value = held[last]
        if value is None and isinstance(last, str):
            del held[last]
        elif "`int" in said and isinstance(value, float) and value.is_integer():
            for at in range(len(held)) if isinstance(last, int) else [last]:  # there may be many
                held[at] = _whole(held[at])
        else:
            return None
    except (LookupError, TypeError, msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    return msgspec.json.encode(document)


def _whole(value: Any) -> Any:
    """Return a whole float as an int, and anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _value_at(body: bytes, path: str) -> str:
    """Return what stands at a path of a document, as it was sent, cut."""
    found = Raw(body)
    try:
        for name, index in _STEPS.findall(path):
            kind: Any = dict[str, Raw] if name else list[Raw]
            found = msgspec.json.decode(found, type=kind)[name or int(index)]
    except (msgspec.DecodeError, RecursionError, LookupError):
        return "what cannot be shown"
    text = bytes(found).decode("utf-8", "replace")
    return text if len(text) <= SEEN else text[:SEEN] + "..."
