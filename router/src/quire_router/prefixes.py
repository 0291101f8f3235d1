"""Prefixes that upstreams hold, as a proxy knows them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from quire.core.tokens import IntArray
from quire.errors import ConfigError
from quire.exchange.wire import CacheEvent, EventBatch, StoredEvent
from quire.observe.telling import is_divided, salt_key
from quire.web.keys import scope_of
from quire_router.index import ClusterIndex, Held
from quire_router.sent_index import PIECE, SentIndex, keys_of_pieces

if TYPE_CHECKING:
    from quire.observe.zmq import Subscriber

POLL_S = 0.2
"""Seconds between two looks whether to go on following."""

Decoded = TypeVar("Decoded")
Tokens: TypeAlias = "Callable[[], Awaitable[IntArray | None]]"


class Question(msgspec.Struct):
    """The fields of a request that a proxy reads; the upstream reads all of them.

    Those of any size or type stay as they came: objects of a list take up to twenty times its bytes.
    """

    model: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()
    input_extra: msgspec.Raw = msgspec.Raw()
    input_prefix: msgspec.Raw = msgspec.Raw()
    previous_response_id: str | None = None
    metadata: msgspec.Raw = msgspec.Raw()
    cache_salt: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None

    @property
    def session(self) -> str | None:
        """The id of its conversation, if the request has one."""
        return self.session_id or self.prompt_cache_key or self.user or _user_in(self.metadata)

    @property
    def has_prompt(self) -> bool:
        """Whether it has a prompt, a conversation, or an input."""
        return any(map(_is_given, (self.messages, self.input, self.own_prompt, self.input_prefix)))

    @property
    def own_prompt(self) -> msgspec.Raw:
        """The prompt of a completion: `prompt`, or SGLang's `text` or `input_ids` where nothing else is one."""
        given = next(filter(_is_given, (self.messages, self.input, self.prompt)), None)
        others = (self.text, self.input_ids) if given is None else ()
        return next(filter(_is_given, others), self.prompt)

    @property
    def model_name(self) -> str | None:
        """Its model, which may be an adapter."""
        return _decoded(self.model, str)

    @property
    def first_prompt(self) -> str | list[int] | None:
        """The prompt of a completion, the first of several: text or tokens, if it is as it should be."""
        given = self.own_prompt
        if bytes(given).startswith(b"["):
            tokens = _decoded(given, list[int])
            if tokens is not None:
                return tokens
            given, *_ = _decoded(given, list[msgspec.Raw]) or [given]
        return _decoded(given, str) or _decoded(given, list[int])


class Asker(NamedTuple):
    """The sender of a request: an API key, and its tenant if known.

    `key` stands for the API key; requests of different keys are assumed to share nothing.
    """

    key: str
    tenant: str | None = None


class Known(NamedTuple):
    """Tokens of a prompt that upstreams hold, and the keys of its pieces, where those are noted."""

    held: Held
    keys: Sequence[int] = ()


class Prefixes(Protocol):
    """Knows who holds how much of a prompt."""

    @property
    def index(self) -> ClusterIndex | SentIndex:
        """The index of what upstreams hold."""
        ...

    async def held(self, asked: Question, who: Asker, tokens: Tokens) -> Known:
        """Return the tokens of a request's prompt that upstreams hold, by name; none if it cannot be read.

        `tokens` has an upstream read the prompt: int32 [num_tokens], None where it cannot.
        """
        ...

    def sent(self, known: Known, name: str) -> None:
        """Note that an upstream answers a request."""
        ...

    def follow(self, name: str, endpoint: str) -> None:
        """Follow the events of one more upstream. Raises `ConfigError`."""
        ...

    def forget(self, name: str) -> None:
        """Forget an upstream."""
        ...

    def close(self) -> None:
        """Learn nothing more."""
        ...


class SentPrefixes:
    """Assumes that an upstream holds the latest pieces of text or tokens sent to it, `num_blocks` over all upstreams."""

    def __init__(self, num_blocks: int) -> None:
        self.index = SentIndex(num_blocks)

    async def held(self, asked: Question, who: Asker, tokens: Tokens) -> Known:
        keys = keys_of(asked, who)
        return Known(self.index.found(keys), keys)

    def sent(self, known: Known, name: str) -> None:
        if known.keys:
            self.index.add(name, known.keys)

    def follow(self, name: str, endpoint: str) -> None:
        raise ConfigError(f"events of {name} are not followed here, got {endpoint!r}")

    def forget(self, name: str) -> None:
        self.index.forget(name)

    def close(self) -> None:
        """Nothing is left to be done."""


class ToldPrefixes:
    """Follows the events of upstreams, and looks prompts up by their tokens, which an upstream makes.

        ToldPrefixes(1 << 20, {"http://a:8000": "tcp://a:5557"})

    An endpoint is where events are published and, behind a comma, where they can be asked for again (else at the next port). A
    thread for each upstream takes them. Where tenants or salts divide caches, a prompt is looked up under both names that events have
    for it: vLLM's say the salt itself, those of quire's server a digest of the tenant and the salt, so that the router and the
    servers have to know tenants by the same names. A request whose model is an adapter that events have named is looked up as
    that adapter's. Raises `ConfigError` for an endpoint that is none.
    """

    def __init__(self, num_blocks: int, endpoints: Mapping[str, str] | None = None) -> None:
        self.index = ClusterIndex(num_blocks)
        self._adapters: set[str] = set()
        self._lock = Lock()
        self._followed: dict[str, tuple[Thread, Event]] = {}
        try:
            for name, endpoint in (endpoints or {}).items():
                self.follow(name, endpoint)
        except ConfigError:
            self.close()
            raise

    @property
    def followed(self) -> frozenset[str]:
        """The upstreams that are followed, by their names."""
        return frozenset(self._followed)

    def follow(self, name: str, endpoint: str) -> None:
        """Follow one more upstream. Raises `ConfigError`."""
        from quire.observe.zmq import Subscriber  # noqa: PLC0415 - only who has events needs ZeroMQ
        from quire.observe.zmq.publisher import beside  # noqa: PLC0415 - likewise

        events, _, replay = endpoint.partition(",")
        teller, ending = _Teller(self.index, self._adapters, self._lock, name), Event()
        subscriber = Subscriber(events, teller, replay=replay or beside(events))
        thread = Thread(
            target=self._follow, args=(name, subscriber, ending), name="quire-told", daemon=True
        )
        self._followed[name] = thread, ending
        thread.start()

    def forget(self, name: str) -> None:
        """Stop following an upstream, and forget its contents within `POLL_S`; an unknown one is ignored."""
        if name in self._followed:
            self._followed.pop(name)[1].set()

    async def held(self, asked: Question, who: Asker, tokens: Tokens) -> Known:
        read = await tokens()
        if read is None:
            return Known({})
        return Known(self.found(read, asked.cache_salt, who.tenant, asked.model_name))

    def found(
        self, tokens: IntArray, cache_salt: str | None, tenant: str | None, model: Any = None
    ) -> Held:
        """Return the tokens of a prompt that each upstream holds.

        `tenant`, `cache_salt` and `model` are those of the request; the last may be an adapter.
        """
        salts = [cache_salt]
        scope = scope_of(tenant, cache_salt)
        if is_divided(scope):
            salts.append(salt_key(scope))
        held: Held = {}
        with self._lock:
            lora = model if isinstance(model, str) and model in self._adapters else None
            for salt in salts:
                overlap = self.index.lookup(tokens, [[salt]] if salt else [], lora)
                self.index.touch(overlap)
                for name, counts in overlap.held.items():
                    held[name] = max(held.get(name, counts), counts, key=sum)
        return held

    def sent(self, known: Known, name: str) -> None:
        """Nothing: the upstream tells."""

    def close(self) -> None:
        followed = list(self._followed.values())
        for name in list(self._followed):
            self.forget(name)
        for thread, _ in followed:
            thread.join()

    def _follow(self, name: str, subscriber: Subscriber, ending: Event) -> None:
        with subscriber:
            while not ending.is_set():
                subscriber.poll(POLL_S)
                with self._lock:
                    self.index.degrade(name, is_degraded=subscriber.is_degraded)
        with self._lock:
            self.index.forget(name)


class _Teller:
    """Hands one upstream's events to the index."""

    def __init__(self, index: ClusterIndex, adapters: set[str], lock: Lock, name: str) -> None:
        self._index, self._adapters, self._lock, self._name = index, adapters, lock, name

    def receive(self, batch: EventBatch) -> None:
        with self._lock:
            self._note_adapters(batch.events)
            self._index.apply(self._name, batch.events)

    def begin(self, batches: Sequence[EventBatch]) -> None:
        events = [event for batch in batches for event in batch.events]
        with self._lock:
            self._note_adapters(events)
            self._index.resync(self._name, events)

    def _note_adapters(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            if isinstance(event, StoredEvent) and event.lora_name:
                self._adapters.add(event.lora_name)


def keys_of(asked: Question, who: Asker) -> list[int]:
    """Return the keys of the whole pieces of a prompt, as its JSON has it."""
    given = _laid_out(asked)
    scope = (bytes(asked.model), who.key, asked.cache_salt)
    ends = range(PIECE, len(given) + 1, PIECE)
    return keys_of_pieces(scope, (given[end - PIECE : end] for end in ends))


def _decoded(given: msgspec.Raw, kind: type[Decoded]) -> Decoded | None:
    """Return a field as a type; None if it is absent or has another one."""
    if not bytes(given):
        return None
    try:
        return msgspec.json.decode(given, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


class _Metadata(msgspec.Struct):
    user_id: str | None = None


def _user_in(metadata: msgspec.Raw) -> str | None:
    """Return the user that a request's metadata name, if they are as they should be."""
    found = _decoded(metadata, _Metadata)
    return found and found.user_id


def _laid_out(asked: Question) -> bytes:
    """Return a conversation as bytes in the order of a prompt, without the line of Claude Code's that always differs."""
    system = _BILLING.sub(b"", bytes(asked.system))
    tools, instructions = bytes(asked.tools), bytes(asked.instructions)
    filled = (asked.input_extra, asked.input_prefix)  # of llama-server's `/infill`
    talk = map(bytes, (asked.messages, asked.input, *filled))
    # The first of several prompts begins as it does alone.
    own = bytes(asked.own_prompt).lstrip(b"[ \t\r\n")
    return b"".join([tools, system, instructions, *talk, own])


def _is_given(field: msgspec.Raw) -> bool:
    """Return whether a field is there, and not null."""
    return bytes(field) not in (b"", b"null")


_BILLING = re.compile(rb'x-anthropic-billing-header:[^"\\]*')
