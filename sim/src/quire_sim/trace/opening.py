"""Opening a trace, whatever its format."""

from __future__ import annotations

import re
from pathlib import Path

from quire.errors import ConfigError
from quire_sim.names import unknown
from quire_sim.trace.chunks import open_text, read_some
from quire_sim.trace.files import FileTrace
from quire_sim.trace.formats import FORMATS, layout_of
from quire_sim.trace.kv_events import open_events
from quire_sim.trace.lengths import BLOCK, LengthsTrace, lengths_format
from quire_sim.trace.lengths import FORMATS as WITH_LENGTHS
from quire_sim.trace.rows import ReportingTrace
from quire_sim.trace.schemas import MAX_BLOCK_SIZE
from quire_sim.trace.talks import TALK_KEYS
from quire_sim.trace.texts import BLOCK_SIZE, ConversationTrace, encoder_of

WITH_TEXTS = ("conversations", "requests")

WITH_PROMPTS = ("requests", "claude-code", "codex", "otel")
"""Formats of request logs that a trace is made of."""

_ROW_KEY = re.compile(rb'"(hash_ids|hash_runs|quire_trace)"\s*:')
_BATCH_KEY = re.compile(rb'"events"\s*:\s*\[')
_TALK_KEY = re.compile(rb'"(%s)"\s*:\s*\[' % "|".join(TALK_KEYS).encode())


def open_trace(
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002 - the word of everybody
    block_size: int | None = None,
    tokenizer: str | Path | None = None,
    seed: int = 0,
) -> ReportingTrace:
    """Return the trace in a file: plain, gzip or zstd, found out from its content.

    `format`      one of `FORMATS`; None: found out from how the file begins
    `block_size`  tokens per block; None: what the file says, or what its first rows agree on
    `tokenizer`   of conversations and request logs: a `tokenizer.json` or a folder that has one; None: every byte
                  is a token. `seed`: of the times that they are given

    Raises `TraceError` for a file that cannot be read, is empty or no trace, and `ConfigError` for
    a block size that is not given and cannot be found out. Rows are checked as they are read.
    """
    if format is not None and format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if block_size is not None and not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ConfigError(
            f"a block has between 1 and {MAX_BLOCK_SIZE:,} tokens, got block_size={block_size}"
        )
    path = Path(path).expanduser()
    found = format or _format_without_rows(path)
    if tokenizer is not None and found not in WITH_TEXTS:
        raise ConfigError(f"{path} has ids and no texts: leave the tokenizer out")
    if found in WITH_LENGTHS:
        return LengthsTrace(path, found, block_size or BLOCK)
    if found == "kv-events":
        return open_events(path, block_size)
    if found == "requests":
        from quire_sim.trace.bodies import RequestLogTrace  # noqa: PLC0415 - it needs this package

        return RequestLogTrace(path, block_size or BLOCK_SIZE, encoder_of(tokenizer))
    if found == "conversations":
        return ConversationTrace(path, block_size or BLOCK_SIZE, encoder_of(tokenizer), seed)
    return FileTrace(path, layout_of(path, found, block_size))


def _format_without_rows(path: Path) -> str | None:
    """Return the format of a file that is no JSON Lines of requests; None for one that is."""
    with open_text(path) as stream:
        head = read_some(stream, path)
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    line = head.partition(b"\n")[0]
    if head.startswith(b"[") and not head[1:].lstrip().startswith(b"{"):
        return "kv-events"
    if not head.startswith((b"{", b"[")):
        return lengths_format(head, path)
    if _ROW_KEY.search(line):
        return None
    if _BATCH_KEY.search(line):
        return "kv-events"
    from quire_sim.logs import log_format  # noqa: PLC0415 - it needs this package

    if log_format(head) in WITH_PROMPTS:
        return "requests"
    return "conversations" if head.startswith(b"[") or _TALK_KEY.search(head) else None
