"""Records of pages that an engine names by a hash of their tokens, and the tiers that have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from quire.engines.models.weights import fingerprint
from quire.engines.tiered.opening import open_free
from quire.engines.tiered.record_form import RecordForm
from quire.exchange.hashing import NO_TENANT
from quire.tiers.base import Outcome
from quire.tiers.format import Namespace, new_buffer, record_key
from quire.tiers.opening import Spec
from quire.tiers.stack.stack import TierStack

AT_ONCE_BYTES = 64 << 20
"""Pages are copied in pieces of so many bytes, so that a batch takes no more memory."""

GOOD = (Outcome.STORED, Outcome.PRESENT, Outcome.SKIPPED)
"""What is no failure of a store: it was also not wanted, or left out while its tier is left alone."""


class PageRecords(RecordForm):
    """The records of one host pool, or of plain tensors.

    `facts`  all beside the pool's own shape that decides what its bytes mean, the rank included where ranks differ

    `engine` names the pages: a subclass for each engine, as their hashes differ.
    """

    engine = "sglang"

    def __init__(
        self, name: str, num_bytes: int, page_size: int, dtype: str, facts: Mapping[str, object]
    ) -> None:
        self._name = name.encode() + b"\0"
        # The tokens behind a hash are not verified: a namespace of its own.
        space = Namespace(
            model=fingerprint(facts),
            dtype=dtype,
            block_size=page_size,
            layout=f"{self.engine} pages named by hash, pool {name}",
            layers=(),
            heads=(0, 0),
        )
        super().__init__(space, num_bytes, page_size, dtype=dtype)

    def page_key(self, page: str | bytes) -> bytes:
        """Return the key of the page that the engine calls so."""
        name = page.encode() if isinstance(page, str) else page
        return record_key(self._digest, self._name + name, NO_TENANT)


class PageStack:
    """The tiers, as what has pages. Without one that is free it finds and stores nothing."""

    def __init__(self, tiers: Sequence[Spec], settings: Mapping[str, object] | None) -> None:
        self._stack = open_free(tiers, settings)

    @property
    def open_stack(self) -> TierStack | None:
        """The stack while it is open and has a tier."""
        return self._stack

    def close(self) -> None:
        """Write what is to be written, as long as the settings allow, and close the tiers; twice does nothing."""
        if self._stack is not None:
            self._stack.close()
            self._stack = None

    def found(
        self, records: PageRecords, keys: Sequence[str | bytes], *, contiguous: bool
    ) -> list[bool]:
        """Return which pages seem to be there; with `contiguous` none behind the first that is not."""
        if self._stack is None or not keys:
            return [False] * len(keys)
        names = [records.page_key(each) for each in keys]
        return [level >= 0 for level in self._stack.find(names, contiguous=contiguous)]

    def wait_for(self, records: PageRecords, keys: Sequence[str | bytes]) -> None:
        """Wait until those of these pages that are queued are written, as long as a lookup may take."""
        if self._stack is not None:
            names = [records.page_key(each) for each in keys]
            self._stack.drain(self._stack.settings.lookup_timeout_s, names)

    def load(
        self,
        records: PageRecords,
        keys: Sequence[str | bytes],
        fill: Callable[[Sequence[memoryview | None]], None],
    ) -> list[bool]:
        """Hand verified payloads to `fill`, None for missing ones; return which came."""
        if self._stack is None:
            return [False] * len(keys)
        names = [records.page_key(each) for each in keys]
        _, buffers = self._stack.load(names, [records.record_bytes] * len(names))
        ours = [each is not None and records.reads(each) for each in buffers]
        payloads = [
            records.payload(each) if is_one and each is not None else None
            for each, is_one in zip(buffers, ours, strict=True)
        ]
        fill(payloads)
        came = [each is not None for each in payloads]
        del payloads
        self._stack.give_back(buffers)
        return came

    def store(
        self,
        records: PageRecords,
        keys: Sequence[str | bytes],
        fill: Callable[[Sequence[int], list[memoryview]], None],
    ) -> list[Outcome]:
        """Have `fill` write the payloads of those pages that are wanted, by place. Never waits.

        Returns what became of each: what was not wanted is `SKIPPED`, and what is none of `GOOD` failed.
        """
        done = [Outcome.SKIPPED] * len(keys)
        if self._stack is None or not keys:
            return done
        names = [records.page_key(each) for each in keys]
        wanted = self._stack.wanted(names)
        chosen = [at for at in range(len(keys)) if wanted[at]]
        made = [new_buffer(records.record_bytes) for _ in chosen]
        if chosen:
            fill(chosen, [*map(records.payload, made)])
        taken = [names[at] for at in chosen]
        for record, key in zip(made, taken, strict=True):
            records.seal(record, key, self._stack.settings.key)
        outcomes = self._stack.store(taken, made, wanted[chosen])
        for at, outcome in zip(chosen, outcomes, strict=True):
            done[at] = outcome
        return done


def pieces(num_keys: int, num_bytes: int) -> list[range]:
    """Divide keys so that their records take `AT_ONCE_BYTES` at a time."""
    step = max(1, AT_ONCE_BYTES // num_bytes)
    return [range(at, min(at + step, num_keys)) for at in range(0, num_keys, step)]
