"""The store of variants: bounded in bytes, found by passage and scope, verified whole."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from quire.config import parse_bytes
from quire.errors import ConfigError, InvariantError, PinError
from quire.scope import Scope
from quire_passages.company import goes_for
from quire_passages.variants import HeldKV, Variant

Shelf = tuple[bool, Scope]
"""Whether all scopes of one model share what lies there, and the scope."""

Finder = Callable[[bytes], Sequence[Variant]]
"""Returns the variants of a passage by its ids."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The contents and counters of a store.

    put == variants + evicted + dropped + replaced
    """

    variants: int
    num_bytes: int
    capacity_bytes: int
    put: int
    refused: int
    evicted: int
    dropped: int
    replaced: int


class PassageStore:
    """Variants of passages, at most `capacity` bytes of them; the least recently used is evicted first.

    A variant is found by its scope (with the model's fingerprint in it) and all of its ids, never by a
    hash of these. It is never changed: what is placed in a prompt is a copy. A pinned one is not
    evicted; `drop` takes it all the same, and then its `kv` is None for whoever has it.

    most  contextual variants of a passage behind one head; of more, the one whose company is most like another's goes

        sum of num_bytes of all variants <= capacity_bytes
    """

    def __init__(self, capacity: str | int, most: int = 4) -> None:
        self.capacity_bytes = parse_bytes(capacity)
        self._most = most
        self.num_bytes = 0
        self._shelves: dict[Shelf, dict[bytes, list[Variant]]] = {}
        self._order: OrderedDict[int, tuple[Shelf, Variant]] = OrderedDict()
        self._put = self._refused = self._evicted = self._dropped = self._replaced = 0

    def put(self, scope: Scope, variant: Variant, *, shared: bool = False) -> bool:
        """Keep a variant; whether there was room.

        shared: for all scopes of the same model and adapter, and not for this one alone. Raises
        `ConfigError` for a contextual one, whose K and V tell of the prompt that it stood in.

        It replaces one of the same passage behind the same text, or of `most` contextual ones that whose company is
        covered. Where not all that is unpinned would make room for it, nothing is evicted.
        """
        if shared and variant.kind != "isolated":
            raise ConfigError(
                f"{variant.name} was captured behind other passages, and its K and V tell of them; only "
                "isolated captures can be shared between scopes"
            )
        shelf = _shelf(scope, shared=shared)
        held = self._shelves.get(shelf, {}).get(variant.ids, ())
        same = [each for each in held if each.before == variant.before]
        if not same and (spare := self._spare(held, variant)) is not None:
            same = [spare]
        pinned = sum(each.num_bytes for _, each in self._order.values() if each.pins)
        pinned += sum(each.num_bytes for each in same if not each.pins)
        is_full = pinned + variant.num_bytes > self.capacity_bytes
        if is_full or variant in same or any(each.pins for each in same):
            self._refused += 1
            return False
        for each in same:
            self._remove(each)
            self._replaced += 1
        self._make_room(variant.num_bytes)
        self._shelves.setdefault(shelf, {}).setdefault(variant.ids, []).append(variant)
        self._order[variant.number] = (shelf, variant)
        self.num_bytes += variant.num_bytes
        self._put += 1
        return True

    def lacks(self, scope: Scope, variant: Variant) -> bool:
        """Whether a variant, with or without K and V, adds to those of its passage."""
        held = self.variants(scope, variant.ids, variant.head)
        is_there = any(each.before == variant.before for each in held)
        return not is_there and self._spare(held, variant) is not variant

    def variants(self, scope: Scope, ids: bytes, head: bytes) -> Sequence[Variant]:
        """Return the variants of a passage captured behind this head: those of its scope, and shared ones."""
        return self.finder(scope, head)(ids)

    def finder(self, scope: Scope, head: bytes) -> Finder:
        """Return what says the same of one passage after the other, until the store changes."""
        own = self._shelves.get(_shelf(scope, shared=False), {})
        common = self._shelves.get(_shelf(scope, shared=True), {})

        def find(ids: bytes) -> Sequence[Variant]:
            there = (*own.get(ids, ()), *common.get(ids, ()))
            return [each for each in there if each.head == head]

        return find

    def use(self, variant: Variant) -> None:
        """Note that a variant was used now."""
        if variant.number in self._order:
            self._order.move_to_end(variant.number)

    def pin(self, variants: Sequence[Variant]) -> "Pins":
        """Keep variants from being evicted until the pins are closed."""
        return Pins(variants)

    def drop(self, variant: Variant) -> bool:
        """Let a variant go, pinned or not; whether it was there."""
        if variant.number not in self._order:
            return False
        self._remove(variant)
        self._dropped += 1
        return True

    def purge(self, is_own: Callable[[Scope], bool]) -> list[HeldKV]:
        """Drop all variants of some scopes, pinned or not; return their KV. Shared ones belong to no scope."""
        own = [variant for (_, scope), variant in self._order.values() if is_own(scope)]
        held = [variant.kv for variant in own if variant.kv is not None]
        for variant in own:
            self.drop(variant)
        return held

    def clear(self) -> int:
        """Let all variants go; how many there were."""
        gone = [variant for _, variant in self._order.values()]
        return sum(self.drop(variant) for variant in gone)

    @property
    def stats(self) -> StoreStats:
        """The contents and counters of the store."""
        return StoreStats(
            variants=len(self._order),
            num_bytes=self.num_bytes,
            capacity_bytes=self.capacity_bytes,
            put=self._put,
            refused=self._refused,
            evicted=self._evicted,
            dropped=self._dropped,
            replaced=self._replaced,
        )

    def check(self) -> None:
        """Raise `InvariantError` unless the class equation and that of the stats hold."""
        shelves = self._shelves.values()
        listed = {each.number for shelf in shelves for held in shelf.values() for each in held}
        total = sum(variant.num_bytes for _, variant in self._order.values())
        gone = self._evicted + self._dropped + self._replaced
        if not (
            listed == set(self._order)
            and total == self.num_bytes <= self.capacity_bytes
            and self._put == len(self._order) + gone
            and all(shelf and all(shelf.values()) for shelf in shelves)
        ):
            raise InvariantError(
                f"a store of {len(self._order)} variants lists {len(listed)}; they have {total} bytes, "
                f"{self.num_bytes} are counted, the limit is {self.capacity_bytes}"
            )

    def _spare(self, held: Sequence[Variant], variant: Variant) -> Variant | None:
        """Return which of the contextual variants of a passage goes for a new one, or that one; None: none has to."""
        if variant.kind != "contextual":
            return None
        alike = [each for each in held if each.kind == "contextual" and each.head == variant.head]
        if len(alike) < self._most:
            return None
        at = goes_for(variant.predecessors, [each.predecessors for each in alike])
        return variant if at is None else alike[at]

    def _make_room(self, num_bytes: int) -> None:
        for _, variant in list(self._order.values()):
            if self.num_bytes + num_bytes <= self.capacity_bytes:
                return
            if not variant.pins:
                self._remove(variant)
                self._evicted += 1

    def _remove(self, variant: Variant) -> None:
        name, _ = self._order.pop(variant.number)
        shelf = self._shelves[name]
        held = shelf[variant.ids]
        held.remove(variant)
        if not held:
            del shelf[variant.ids]
        if not shelf:
            del self._shelves[name]
        self.num_bytes -= variant.num_bytes
        variant.kv = None


class Pins:
    """Variants that stay until `close`. Raises `PinError` when closed twice."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        self._variants: list[Variant] | None = list(variants)
        for each in self._variants:
            each.pins += 1

    def close(self) -> None:
        """Let the variants be evicted again."""
        if self._variants is None:
            raise PinError("these pins are closed already")
        for each in self._variants:
            each.pins -= 1
        self._variants = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _shelf(scope: Scope, *, shared: bool) -> Shelf:
    return shared, Scope(lora=scope.lora, model=scope.model) if shared else scope
