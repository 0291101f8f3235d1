"""Variants: the KV of a passage as captured once, and the facts of that capture."""

from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Literal, Protocol

from quire.engines.segments import Segments
from quire_passages.masses import Masses

Kind = Literal["isolated", "contextual"]

_numbers = count(1)


class HeldKV(Protocol):
    """K and V of a passage, in any memory."""

    @property
    def num_bytes(self) -> int:
        """Bytes that they take."""
        ...


@dataclass(eq=False, slots=True)
class Variant:
    """K and V of the passage `ids` as they were behind `before`, both int32 ids as bytes.

    kind          isolated: `before` is the head alone; contextual: other passages stood there too
    predecessors  these passages, in order, as bytes; none for an isolated one
    masses        the attention of the passage to what stood before it, where that was measured
    kv            what an engine holds; None from when the variant has gone
    rounded       whether it was kept in fewer bits meanwhile: then it is exact nowhere
    """

    ids: bytes
    before: bytes
    kind: Kind
    kv: HeldKV | None
    predecessors: tuple[bytes, ...] = ()
    masses: Masses | None = None
    rounded: bool = False
    pins: int = 0
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def start(self) -> int:
        """The position of the first token when it was captured."""
        return len(self.before) // 4

    @property
    def num_tokens(self) -> int:
        """Tokens of the passage."""
        return len(self.ids) // 4

    @property
    def num_bytes(self) -> int:
        """Bytes of K, V and ids; 0 when it has gone."""
        return 0 if self.kv is None else self.kv.num_bytes + len(self.ids) + len(self.before)

    @property
    def head(self) -> bytes:
        """The head of the prompt in which it was captured: what stood before all passages."""
        return self.before[: len(self.before) - sum(map(len, self.predecessors))]

    @property
    def name(self) -> str:
        """A short name for reports, from its ids and those before it: it tells of no other capture."""
        digest = blake2b(self.before, digest_size=4, key=blake2b(self.ids).digest())
        return f"{self.kind} {digest.hexdigest()}"


def in_prompt(
    segments: Segments, index: int, kv: HeldKV | None = None, masses: Masses | None = None
) -> Variant:
    """Return a variant of a passage as it stands in a prompt; the first one is isolated."""
    texts = segments.passage_texts
    before = segments.text[: 4 * segments.spans[index][0]]
    kind = "contextual" if index else "isolated"
    return Variant(texts[index], before, kind, kv, texts[:index], masses)


def is_behind(variant: Variant, segments: Segments, index: int) -> bool:
    """Whether a variant was captured behind the very text before a passage of a prompt, and is exact there."""
    is_there = variant.start == segments.spans[index][0] and not variant.rounded
    return is_there and segments.text.startswith(variant.before)
