"""A request on its way to one upstream, and its answer back."""

import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack

from starlette.responses import Response

from quire.web.clients import HOME
from quire.web.errors import ApiError
from quire.web.mends import MENDED, Mends
from quire.web.origin import OriginRequest, passed, target_of
from quire.web.origin_answer import Headers, OriginAnswer, OriginError
from quire_router.counts import ProxyCounts
from quire_router.gateway import Broken, Incoming, Passed
from quire_router.upstreams import Upstream

ELSEWHERE = frozenset({429, 502, 503})
"""Answers of an upstream that has no room, or is none: another one is asked."""

MADE_BY = "x-quire-upstream"
"""The header that says which upstream answered, by its number, from 0; the operator names one by it."""

MOST_WHOLE = 1 << 20
"""Bytes of an answer that is passed on only once it is whole, so that one that breaks off is a 502."""

TO_ALL = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"))
"""Paths of requests that each upstream gets."""

_OWN = frozenset((b"content-length", b"origin", HOME.encode(), MADE_BY.encode()))
"""Headers of requests that are not passed on; whether a page may ask was decided here."""


class UpstreamRelay:
    """Sends requests to upstreams, and passes their answers on.

    `max_body`  bytes of a request
    `slow_s`    seconds in which a client has to take what it is sent
    """

    def __init__(self, counts: ProxyCounts, *, max_body: int, slow_s: float) -> None:
        self._counts, self._max_body, self._slow_s = counts, max_body, slow_s

    async def ask(
        self, upstream: Upstream, incoming: Incoming, mends: Mends, *, is_fresh: bool
    ) -> Response:
        """Return an upstream's answer: whole, or a stream whose first piece has come. Raises `OriginError`."""
        scope, since = incoming.request.scope, time.monotonic()
        mended = await mends.of(scope, incoming.body, self._max_body)
        came, body = (
            (scope["headers"], incoming.body) if mended is None else (mended.headers, mended.body)
        )
        headers = [pair for pair in passed(came) if pair[0] not in _OWN]
        headers.append((HOME.encode(), upstream.home.encode()))
        if not body and scope["method"] not in ("POST", "PUT", "PATCH"):
            body = None
        asked = OriginRequest(scope["method"], target_of(scope), headers, body)
        with ExitStack() as held:
            held.callback(upstream.left, upstream.asked())
            try:
                answer = await upstream.origin.ask(asked, is_fresh=is_fresh)
                held.callback(answer.close)
                given = dict(answer.headers)
                kept = [pair for pair in passed(answer.headers) if pair[0] != b"date"]
                kept.append((MADE_BY.encode(), b"%d" % upstream.number))
                if mended is not None:
                    kept.append((MENDED.lower().encode(), mended.told.encode()))
                length = given.get(b"content-length", b"")
                is_whole = answer.is_whole or answer.status in ELSEWHERE
                is_whole = is_whole or (length.isdigit() and int(length) <= MOST_WHOLE)
                is_whole = is_whole or scope["path"] in TO_ALL
                first = await (answer.read(MOST_WHOLE) if is_whole else answer.pending())
            except OriginError as error:
                if not error.has_begun:
                    raise
                upstream.failed()
                said = f"upstream {upstream.number} broke off in its answer ({error}); ask again"
                raise ApiError(502, said, code="broken_off") from error
            upstream.breaker.answered()
            self._counts.answers[upstream.name, answer.status] += 1
            self._counts.first.add(time.monotonic() - since)
            held.callback(lambda: self._counts.whole.add(time.monotonic() - since))
            if is_whole:
                if first and not length:  # it came in chunks, which clients of HTTP/1.0 do not read
                    kept.append((b"content-length", b"%d" % len(first)))
                return WholeAnswer(answer.status, kept, first)
            is_told = b"content-encoding" not in given and given.get(
                b"content-type", b""
            ).startswith(b"text/event-stream")
            path = scope["path"] if is_told else None
            pieces = _whole(first, answer, upstream)
            made = Passed(pieces, path, self._slow_s, held.pop_all())
        made.status_code, made.raw_headers = answer.status, kept
        return made


class WholeAnswer(Response):
    """An upstream's whole answer, with its own headers."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        self.status_code, self.raw_headers, self.body = status, headers, body
        self.background = None


async def _whole(first: bytes, answer: OriginAnswer, upstream: Upstream) -> AsyncGenerator[bytes]:
    """Yield the pieces of an answer. Raises `Broken`."""
    piece = first
    try:
        while piece:
            yield piece
            piece = await answer.pending()
    except OriginError as error:
        upstream.failed()
        raise Broken from error
