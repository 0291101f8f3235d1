"""Recording: the requests of a running cache as a trace, without their content."""

from __future__ import annotations

import gzip
import os
import time
from array import array
from collections import deque
from collections.abc import Callable
from errno import ENOSPC
from hashlib import blake2b
from pathlib import Path
from typing import Self

import msgspec

from quire.config import check_count
from quire.core import Hint, Sequence, Watcher
from quire.core.kernel import Kernel
from quire.core.media import MediaTable
from quire.core.stats import Missed
from quire.core.terms import NO_HINT
from quire.core.tokens import TOKEN_BYTES, Key
from quire.errors import ConfigError, TraceError
from quire.exchange.hashing import chain, root_digest

SAFE_BLOCK = 16
"""Tokens per block below which a recording has to be allowed by name: a block of few tokens can be guessed."""

MAX_BLOCKS = 20_000_000
"""Distinct blocks after which a recording ends, by default: about 2 GB of names in memory."""

MAX_WAITING = 10_000
"""Rows that wait for a request before them to end; beyond, it is written without its end."""

GZIP_BYTES = 1 << 16
"""Bytes of text that are compressed together, and lost in a crash. Rows of a plain file wait for nobody."""

GZIP_S = 10.0
"""Nor does text wait longer than so many seconds, if requests come."""


class RecordedRow(msgspec.Struct, omit_defaults=True, gc=False):
    """One request, as quire's own trace format has it; see docs/traces.md."""

    t: float
    in_: int = msgspec.field(name="in")
    out: int
    runs: list[tuple[int, int]]
    session: str | None = None
    hint: Hint | None = None
    took: float | None = None


class Recorder(Watcher):
    """Writes one row per request of a `CacheManager` to a file that `quire replay` reads.

        with Recorder("requests.jsonl.gz", block_size=16) as recorder:
            manager = CacheManager(10_000, 16, watchers=[recorder])

    path        a new file; `.gz` is compressed
    block_size  the manager's tokens per block, at least 16
    guessable   whether blocks may be smaller all the same: who sends prompts and reads the file can then try what
                stands in a block of another's prompt, token by token
    salt        what the names of sessions and blocks are mixed with, beside their scope; None: random. Sessions of two
                recordings have the same names only where the salt is the same; blocks never do
    clock       seconds, rising
    max_blocks  distinct blocks after which the recording ends, and `full` is true

    A row has the time of its admission (the first `reserve` that succeeds), lengths in tokens, the hint, and of every
    full block of the prompt a number, by first appearance: equal numbers, equal prefixes in the same
    scope. Neither tokens nor hashes are in the file. `out` is the tokens after the prompt that have
    KV, which the last one of an answer need not. Rows stand in order of admission, so a row
    waits until every earlier request has ended, or `MAX_WAITING` wait. Costs about 1 us per block
    of a prompt. A crash loses rows that wait, and of a compressed file the last 64 KiB of text. A
    write that fails ends the recording and not the request: `error` says why, and `close` raises.
    Raises `ConfigError` for a file that cannot be written, and for smaller blocks than are safe.
    """

    def __init__(
        self,
        path: str | Path,
        block_size: int,
        *,
        guessable: bool = False,
        salt: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        self._block_bytes = check_count("block_size", block_size) * TOKEN_BYTES
        if block_size < SAFE_BLOCK and not guessable:
            raise ConfigError(
                f"block_size is {block_size}, a recording's is at least {SAFE_BLOCK}: whoever sends prompts and "
                "reads the file could guess another's tokens block by block; give larger blocks, or "
                "guessable=True if nobody does both"
            )
        self._max_blocks = check_count("max_blocks", max_blocks)
        self._salt = os.urandom(32) if salt is None else bytes(salt)
        self._clock = clock
        self._started = clock()
        self._numbers: dict[bytes, int] = {}
        self._waiting: deque[RecordedRow] = deque()
        self._open: dict[int, RecordedRow] = {}
        self._encode = msgspec.json.Encoder().encode
        self.num_requests = 0
        self.full = False
        self.path = Path(path).expanduser()
        self.error: OSError | None = None
        self._text = bytearray()
        self._text_at = self._started
        try:
            self._file = self.path.open("xb", buffering=0)
        except OSError as error:
            msg = f"cannot record to {str(path)!r}: {error.strerror}; name a new file"
            raise ConfigError(msg) from error
        self._compressed = self.path.suffix == ".gz"
        self._put({"quire_trace": 1, "block_size": block_size})
        self._flush()

    def begin(self, kernel: Kernel) -> None:
        self._media: MediaTable = kernel.tree.media

    def opened(self, seq: Sequence, key: Key, missed: Missed) -> None:
        if self.full or self._file.closed:
            return
        hint = seq.terms.hint
        root = root_digest(seq.scope)
        name = self._name(root + hint.session_id.encode()) if hint.session_id else None
        if hint.session_id:
            hint = msgspec.structs.replace(hint, session_id=name)
        row = RecordedRow(
            round(self._clock() - self._started, 6),
            len(key) // TOKEN_BYTES,
            0,
            self._runs(root, key),
            session=name,
            hint=None if hint in (NO_HINT, Hint(session_id=name)) else hint,
        )
        self._waiting.append(row)
        if len(self._waiting) > MAX_WAITING:
            self._write_row(self._waiting.popleft())
            self._write()
        self._open[id(seq)] = row
        self.full = len(self._numbers) >= self._max_blocks

    def closed(self, seq: Sequence) -> None:
        row = self._open.pop(id(seq), None)
        if row is None:
            return  # a fork is no request of its own
        computed = seq.num_cached if seq.state == "suspended" else seq.computed
        row.out = max(computed - row.in_, 0)
        row.took = round(self._clock() - self._started - row.t, 6)
        self._write()

    def close(self) -> None:
        """Write what is left, requests that still run without their ends, and close the file.

        Raises `TraceError` if a write failed, now or before: the rows until then are there.
        """
        if self._file.closed:
            return
        self._open.clear()
        while self._waiting:
            self._write_row(self._waiting.popleft())
        self._flush()
        self._file.close()
        if self.error is not None:
            raise TraceError(
                f"the recording {str(self.path)!r} broke off before request "
                f"{self.num_requests + 1:,}: {self.error.strerror}"
            ) from self.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._file.closed else "full" if self.full else "open"
        if self.error is not None:
            state = f"broken off ({self.error.strerror})"
        return (
            f"<Recorder {str(self.path)!r}, {state}: {self.num_requests} requests written, "
            f"{len(self._open)} running, {len(self._numbers)} distinct blocks>"
        )

    def _write(self) -> None:
        while self._waiting and self._waiting[0].took is not None:
            self._write_row(self._waiting.popleft())

    def _write_row(self, row: RecordedRow) -> None:
        self._put(row)
        now = self._clock()
        if not self._compressed or len(self._text) >= GZIP_BYTES or now - self._text_at >= GZIP_S:
            self._text_at = now
            self._flush()
        self.num_requests += self.error is None

    def _put(self, line: object) -> None:
        self._text += self._encode(line) + b"\n"

    def _flush(self) -> None:
        """Write whole rows, compressed on their own, so that a crash leaves what can be read."""
        if self._text and self.error is None:
            data = bytes(self._text)
            if self._compressed:
                data = gzip.compress(data, 6, mtime=0)
            try:
                if self._file.write(data) != len(data):
                    self.error = OSError(ENOSPC, os.strerror(ENOSPC))
            except OSError as error:
                self.error = error
        if self.error is not None:
            self.full = True
        self._text.clear()

    def _runs(self, root: bytes, key: Key) -> list[tuple[int, int]]:
        """Number the full blocks of a prompt below the digest of its scope, those met before as before."""
        numbers = self._numbers
        ids = array("q")
        for digest in chain(self._digest(root), key, self._block_bytes, self._media):
            ids.append(numbers.setdefault(digest[:16], len(numbers)))
        runs: list[tuple[int, int]] = []
        for block in ids:
            if runs and block == runs[-1][0] + runs[-1][1]:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((block, 1))
        return runs

    def _name(self, text: bytes) -> str:
        return self._digest(text).hex()[:16]

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, key=self._salt[:64], digest_size=32).digest()
