"""Recording: the requests of a running cache as a trace, without their content."""

from __future__ import annotations

import gzip
import os
import time
from array import array
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from quire.core import Hint, Sequence
from quire.core.groups import check_count
from quire.core.hashing import chain, root_digest
from quire.core.hints import NO_HINT
from quire.core.scope import MediaTable
from quire.core.tokens import TOKEN_BYTES, Key
from quire.errors import ConfigError

MAX_BLOCKS = 20_000_000
"""Distinct blocks after which a recording ends, by default: about 2 GB of names in memory."""


class RecordedRow(msgspec.Struct, omit_defaults=True, gc=False):
    """One request, as quire's own trace format has it; see docs/traces.md."""

    t: float
    in_: int = msgspec.field(name="in")
    out: int
    runs: list[tuple[int, int]]
    session: str | None = None
    hint: Hint | None = None
    took: float | None = None


class Recorder:
    """Writes one row per request of a `CacheManager` to a file that `quire replay` reads.

        with Recorder("requests.jsonl.gz", block_size=16) as recorder:
            manager = CacheManager(10_000, 16, observer=recorder)

    path        a new file; `.gz` is compressed
    block_size  the manager's tokens per block
    salt        what block hashes and session names are mixed with; None: random. Rows of two
                recordings can be joined only where the salt is the same
    clock       seconds, rising
    max_blocks  distinct blocks after which the recording ends, and `full` is true

    A row has the time of arrival, lengths in tokens, the hint, and of every full block of the
    prompt a number that stands for its salted hash: equal numbers, equal prefixes in the same
    scope. Neither tokens nor hashes are in the file. Rows stand in order of arrival, so a row
    waits until every earlier request has ended. Costs about 1 us per block of a prompt.
    Raises `ConfigError` for a file that cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        block_size: int,
        *,
        salt: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        self._block_bytes = check_count("block_size", block_size) * TOKEN_BYTES
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
        try:
            plain = self.path.open("xb")
        except OSError as error:
            msg = f"cannot record to {str(path)!r}: {error.strerror}; name a new file"
            raise ConfigError(msg) from error
        gz = gzip.GzipFile("", "wb", fileobj=plain, mtime=0) if self.path.suffix == ".gz" else None
        self._file = gz if gz is not None else plain
        self._files = [self._file, plain]
        self._file.write(self._encode({"quire_trace": 1, "block_size": block_size}) + b"\n")

    def opened(self, seq: Sequence, key: Key, media: MediaTable) -> None:
        """A request arrived: `key` holds its prompt."""
        if self.full or self._file.closed:
            return
        hint = seq.hint
        name = self._name(hint.session_id.encode()) if hint.session_id else None
        if hint.session_id:
            hint = msgspec.structs.replace(hint, session_id=name)
        row = RecordedRow(
            round(self._clock() - self._started, 6),
            len(key) // TOKEN_BYTES,
            0,
            self._runs(seq, key, media),
            session=name,
            hint=None if hint in (NO_HINT, Hint(session_id=name)) else hint,
        )
        self._waiting.append(row)
        self._open[id(seq)] = row
        self.full = len(self._numbers) >= self._max_blocks

    def closed(self, seq: Sequence) -> None:
        """A request ended; forks of it are no requests of their own."""
        row = self._open.pop(id(seq), None)
        if row is None:
            return
        row.out = max(seq.computed - row.in_, 0)
        row.took = round(self._clock() - self._started - row.t, 6)
        self._write()

    def close(self) -> None:
        """Write what is left, requests that still run without their ends, and close the file."""
        if self._file.closed:
            return
        self._open.clear()
        while self._waiting:
            self._write_row(self._waiting.popleft())
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._file.closed else "full" if self.full else "open"
        return (
            f"<Recorder {str(self.path)!r}, {state}: {self.num_requests} requests written, "
            f"{len(self._open)} running, {len(self._numbers)} distinct blocks>"
        )

    def _write(self) -> None:
        while self._waiting and self._waiting[0].took is not None:
            self._write_row(self._waiting.popleft())

    def _write_row(self, row: RecordedRow) -> None:
        self._file.write(self._encode(row) + b"\n")
        self.num_requests += 1

    def _runs(self, seq: Sequence, key: Key, media: MediaTable) -> list[tuple[int, int]]:
        """Number the full blocks of a prompt, those met before as before."""
        root = self._digest(root_digest(seq.scope))
        numbers = self._numbers
        ids = array("q")
        for digest in chain(root, key, self._block_bytes, media):
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
