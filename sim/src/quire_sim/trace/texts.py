"""Conversations as traces: each answer is a request whose prompt is all that came before it.

A message is written as its role, a newline, its text and a newline; a prompt ends with the role
of the answer. Pieces are tokenized one by one, and no template of a model is applied, so lengths
differ by a few tokens per message from what a server would see. Only ids of blocks leave the
reader: no text, no token, no name of a conversation.

Files of conversations rarely say when. Times are made up, in the same way for the same seed: see
`Pace`. Answers of a conversation come in order, and conversations begin in the order of the file.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.random import Generator

from quire.core.media import MediaTable
from quire.core.tokens import TOKEN_BYTES, IntArray, key_of
from quire.errors import ConfigError, TraceError
from quire.exchange.hashing import chain, root_digest
from quire.extras import lacking
from quire.scope import Scope
from quire_sim.distributions import Lognormal, draw_gap, generator
from quire_sim.trace.rows import Findings, ReportingTrace, TraceRequest, compress
from quire_sim.trace.talks import Message, read_talks

BLOCK_SIZE = 16
"""Tokens per block where none are given."""

ANSWER = "assistant"


class Pace(msgspec.Struct, frozen=True):
    """The times of the requests of conversations.

    `starts_per_s`  conversations that begin per second, a Poisson process
    `tokens_per_s`  speed of an answer
    `think`         seconds from the end of an answer to the next request
    """

    starts_per_s: float = 1.0
    tokens_per_s: float = 50.0
    think: Lognormal = Lognormal(mean=30.0, sigma=1.0)


PACE = Pace()


class Encoder(NamedTuple):
    """A tokenizer: its name for people, and texts to ids, int32 each, without special ones."""

    name: str
    encode: Callable[[list[str]], list[IntArray]]


class ConversationTrace(ReportingTrace):
    """The trace in a file of conversations; memory grows with its different blocks."""

    def __init__(self, path: Path, block_size: int, encoder: Encoder, seed: int) -> None:
        super().__init__(str(path), "conversations", block_size)
        self._path = path
        self._encoder = encoder
        self._seed = seed
        generator(seed)

    def read(self, report: Findings) -> Iterator[TraceRequest]:
        numbers: dict[bytes, int] = {}
        num_requests = 0
        for asked in self._in_order(report):
            num_requests += 1
            ids = [numbers.setdefault(name, len(numbers)) for name in asked.talk[: asked.blocks]]
            yield TraceRequest(
                asked.row,
                asked.time_s,
                asked.prompt_tokens,
                asked.output_tokens,
                compress(np.array(ids, np.int32)),
                asked.session,
            )
        if not num_requests:
            raise TraceError(f"{self._path}: none of its conversations has an answer to anything")

    def _in_order(self, report: Findings) -> Iterator[_Asked]:
        """Yield what is asked in order of time, as conversations begin."""
        rng = generator(self._seed)
        waiting: list[tuple[float, int, _Asked]] = []
        begin = 0.0
        left_out = 0
        for number, messages in enumerate(read_talks(self._path), 1):
            if number > 1:
                begin = round(begin + draw_gap(rng, PACE.starts_per_s), 6)
            while waiting and waiting[0][0] <= begin:
                yield heapq.heappop(waiting)[2]
            left_out += sum(message.left_out for message in messages)
            for asked in self._asked(messages, str(number), begin, rng, report):
                heapq.heappush(waiting, (asked.time_s, asked.row, asked))
        while waiting:
            yield heapq.heappop(waiting)[2]
        report.notes.append(
            f"prompts are tokenized here ({self._encoder.name}), as roles and texts, without a "
            "model's template"
        )
        report.notes.append(
            f"times are made up (seed {self._seed}): {PACE.starts_per_s:g} conversations begin per "
            f"second; an answer takes 1/{PACE.tokens_per_s:g} s per token, and the next question "
            f"comes {PACE.think.mean:g} s later on average"
        )
        if left_out:
            report.notes.append(f"{left_out:,} parts that are no text are left out")

    def _asked(
        self, messages: list[Message], session: str, begin: float, rng: Generator, report: Findings
    ) -> Iterator[_Asked]:
        """Yield the requests of a conversation that begins at `begin`."""
        texts = [piece for said in messages for piece in (f"{said.role}\n", f"{said.text}\n")]
        tokens = self._encoder.encode(texts) if texts else []
        ends = np.cumsum([0, *map(len, tokens)]).tolist()
        answers = [place for place, said in enumerate(messages) if said.role == ANSWER]
        if not answers:
            return
        names = self._names(tokens[: 2 * answers[-1] + 1])
        time_s = begin
        for place in answers:
            report.rows += 1
            prompt, output = ends[2 * place + 1], len(tokens[2 * place + 1])
            if not place:
                report.without_prompt += 1
                continue
            blocks = prompt // self.block_size
            time_s = round(time_s, 6)
            yield _Asked(report.rows, time_s, prompt, output, session, names, blocks)
            time_s += output / PACE.tokens_per_s + PACE.think.draw(rng)

    def _names(self, tokens: list[IntArray]) -> list[bytes]:
        """Return a name for each full block: of it and all before it."""
        key = key_of(np.concatenate(tokens))
        digests = chain(root_digest(Scope()), key, self.block_size * TOKEN_BYTES, MediaTable())
        return [digest[:16] for digest in digests]


class _Asked(msgspec.Struct, frozen=True):
    """A request: its prompt has the first `blocks` of the blocks of `talk`."""

    row: int
    time_s: float
    prompt_tokens: int
    output_tokens: int
    session: str
    talk: list[bytes]
    blocks: int


def encoder_of(path: str | Path | None) -> Encoder:
    """Return the tokenizer at a path; without one, every byte is a token. Raises `ConfigError`.

    Bytes are three to four times as many tokens as a tokenizer makes.
    """
    if path is None:
        return Encoder("bytes, a token each", _bytes_of)
    path = Path(path).expanduser()
    tokenizer = _loaded(path / "tokenizer.json" if path.is_dir() else path)

    def encode(texts: list[str]) -> list[IntArray]:
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        made = tokenizer.encode_batch(clean, add_special_tokens=False)
        return [np.array(each.ids, np.int32) for each in made]

    return Encoder(str(path), encode)


def _bytes_of(texts: list[str]) -> list[IntArray]:
    encoded = (text.encode("utf-8", "surrogatepass") for text in texts)
    return [np.frombuffer(data, np.uint8).astype(np.int32) for data in encoded]


def _loaded(file: Path) -> Any:
    try:
        library: Any = import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(
            f"{lacking('reading a tokenizer', 'tokenizers', 'hf')}; without a tokenizer, "
            "every byte is a token"
        ) from error
    if not file.is_file():
        raise ConfigError(f"no tokenizer at {str(file)!r}: name a tokenizer.json or its folder")
    try:
        tokenizer: Any = library.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain ones
        raise ConfigError(f"{str(file)!r} is no tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
