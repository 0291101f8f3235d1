"""Writing traces in quire's own format."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import msgspec

from quire.errors import TraceError
from quire_sim.trace.chunks import create_text
from quire_sim.trace.rows import Trace, TraceRequest
from quire_sim.trace.schemas import QuireHeader, QuireRow


def save_trace(trace: Trace, path: str | Path) -> int:
    """Write a trace in quire's own format, and return how many requests it has.

    The suffix says how to compress: `.gz`, `.zst`, or not at all. The file appears when it is
    complete, so a trace may be written over the file it is read from; one that cannot be read
    to its end leaves what was there. Raises `TraceError`.
    """
    path = Path(path).expanduser()
    part = path.with_name(f".{path.name}.part{path.suffix}")
    try:
        with create_text(part) as text:
            encode = msgspec.json.Encoder().encode
            text.write(encode(QuireHeader(block_size=trace.block_size)) + b"\n")
            count = 0
            for _, row in own_rows(trace):
                text.write(encode(row) + b"\n")
                count += 1
        if not count:
            raise TraceError(f"{trace.source} has no requests: there is nothing to write")
        os.replace(part, path)  # noqa: PTH105 - Path.replace says the same
    finally:
        part.unlink(missing_ok=True)
    return count


def own_rows(trace: Iterable[TraceRequest]) -> Iterator[tuple[TraceRequest, QuireRow]]:
    """Yield the requests of a trace, each with its row in quire's own format."""
    for request in trace:
        yield (
            request,
            QuireRow(
                request.time_s,
                request.prompt_tokens,
                request.output_tokens,
                cast("list[tuple[int, int]]", request.runs.tolist()),
                request.session,
                request.hint,
                request.duration_s,
            ),
        )
