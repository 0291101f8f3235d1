"""What a cache of a transformers model keeps: pools on its device, and tiers below them."""

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, Never, Self, cast

import torch

from quire.budget import EXPECTED_TOKENS
from quire.config import nearest, parse_bytes
from quire.core import CacheManager, Observer, Scope, Stats
from quire.engines.hf.battery import check_kind
from quire.engines.hf.fingerprint import Weights
from quire.engines.hf.inputs import Signatures
from quire.engines.hf.making import Making
from quire.engines.hf.media import MediaReader
from quire.engines.hf.memory import (
    Balance,
    GroupMemory,
    group_memory,
    named_groups,
    split_layout,
    used_words,
)
from quire.engines.hf.models import ModelFace, check_model
from quire.engines.hf.naming import checksum
from quire.engines.hf.probe import probe_model
from quire.engines.hf.report import NO_REPORT
from quire.engines.hf.store import BlockStore
from quire.engines.hf.turns import Turn, in_turn
from quire.engines.hf.verify import FirstCalls
from quire.engines.hf.watched import Watched
from quire.engines.hf.weights import Sight
from quire.errors import ConfigError, OutOfBlocks
from quire.extras import lacking
from quire.tensors.pool import make_pool
from quire.tensors.transfers import transfers_to

if TYPE_CHECKING:
    from quire.engines.tiered.opening import Tiers
    from quire.engines.tiered.saved import Loaded
    from quire.engines.tiered.store import TieredStore
    from quire.tensors.quant import QuantError
    from quire.tiers.stack.stack import TierStack


Verify = Literal["probe", "first"] | None
_VERIFY = ("probe", "first", None)


class KeptBlocks(ModelFace):
    """The half of `PrefixCache` that keeps: memory, tiers, files. Its arguments are explained there."""

    def __init__(
        self,
        model: Any,
        capacity: str | int | Mapping[str, int] = "1GiB",
        block_size: int = 16,
        *,
        policy: Any = "lru",
        dtype: torch.dtype | None = None,
        expected_tokens: int = EXPECTED_TOKENS,
        snapshot_interval: int | None = None,
        debug: bool = False,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
        tiers: "Tiers | None" = None,
        tier_dtype: str | None = None,
        verify: "Verify" = "probe",
        **unknown: Never,
    ) -> None:
        if unknown:
            name = next(iter(unknown))
            known = inspect.signature(type(self)).parameters
            raise ConfigError(
                f"{type(self).__name__} has no setting {name!r}{nearest(name, known)}"
            )
        check_model(model, type(self).__name__)
        self._turn = Turn()
        capacity_bytes = None if isinstance(capacity, Mapping) else parse_bytes(capacity)
        if verify not in _VERIFY:
            raise ConfigError(f"verify={verify!r}; it is one of {', '.join(map(repr, _VERIFY))}")
        before = Sight(model)
        kinds, computed = probe_model(model, block_size)
        below = None if verify is None else check_kind(model, needs_twin=verify != "first")
        computed = computed.with_interval(snapshot_interval)
        self.layout = computed.stored_as(dtype)
        groups = (
            named_groups(self.layout, cast("Mapping[str, int]", capacity))
            if capacity_bytes is None
            else split_layout(self.layout, capacity_bytes, expected_tokens)
        )
        self._model = model
        self.pools = [
            make_pool(group.memory, num.num_blocks, model.device, debug_nan=debug)
            for group, num in zip(self.layout.groups, groups, strict=True)
        ]
        self.tiers, self._owns_tiers = _stack(tiers)
        manager = CacheManager(
            groups=groups,
            block_size=block_size,
            policy=policy,
            evictions=self.tiers is not None and _writes_back(self.tiers),
            debug=debug,
            clock=clock,
            observer=observer,
            curve=True,
        )
        self.last = NO_REPORT
        self._first = FirstCalls(model, kinds) if verify == "first" else None
        self._clock = clock
        self._signatures = Signatures.of(model)
        self._watched = Watched(model, self._signatures.forward)
        self._media = MediaReader(model)
        # What is kept beyond this process is named by all of the weights.
        read = None if self.tiers is None else checksum
        self._weights = Weights(
            model, self.layout, read, before, lambda: probe_model(model, block_size)
        )
        transfers = transfers_to(model.device)
        self._store = BlockStore(manager, self.pools, self.layout, transfers=transfers)
        if self.tiers is not None:
            try:
                self._store.tiers = self._over(self.tiers, self.fingerprint, tier_dtype)
                self._store.tiers.transfers = transfers
            except BaseException:
                self.close()
                raise
        self._balance = Balance(manager, self.layout)
        self._making = Making(kinds, computed, model.device, debug_nan=debug, padded_below=below)

    @property
    def manager(self) -> CacheManager:
        """What is cached, and the requests that run. Nothing is on its way to tiers meanwhile.

        In a thread whose turn it is not, only to look at counters.
        """
        with self._turn.if_free() as is_ours:
            if is_ours:
                self._store.settle()
        return self._store.manager

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the model when this cache was made or cleared, without adapters.

        Over its settings, its layout and its weights (a sample; with tiers, all). What has changed since
        is part of the key of what is computed since.
        """
        return self._weights.fingerprint

    @property
    def stats(self) -> Stats:
        """Counters of the manager: hit rate, misses by reason, evictions."""
        return self.manager.stats

    @property
    def tier_error(self) -> dict[str, "QuantError"]:
        """How far K and V in tiers are from the pools', by layer group: measured while they are stored.

        All are 0 without `tier_dtype`; empty without tiers.
        """
        if self._store.tiers is None:
            return {}
        errors = self._store.tiers.errors()
        return {group.name: error for group, error in zip(self.layout.groups, errors, strict=True)}

    @in_turn
    def end_session(self, session_id: str, scope: Scope | None = None) -> int:
        """Say that a session named by `Hint(session_id=...)` has ended in this scope: its blocks go first.

        A scope is that of the session's requests, under the adapters that are active now. Returns how many
        blocks that only this session has used are in the cache.
        """
        return self.manager.end_session(session_id, self._weights.scope(scope))

    @in_turn
    def clear(self) -> int:
        """Drop all that is cached, and return how many blocks that were.

        Tiers keep what they have; under changed weights it is not found. After `Interrupted` this is what
        starts the cache anew: all is dropped, counters start again, and 0 is returned.
        """
        if self._store.manager.interrupted:
            self._store.recover()
            self._balance = Balance(self._store.manager, self.layout)
            self._weights.renew()
            return 0
        self._store.transfers.join()
        dropped = self.manager.clear()
        self._weights.renew()
        return dropped

    @in_turn
    def save(self, path: str | os.PathLike[str]) -> int:
        """Write all that is cached into a directory, for `load`; return how many records that were.

        It holds the prompts, and the salts of their scopes, beside K and V. A cache that was saved
        there before is replaced. Raises `ConfigError` for a directory of anything else, `TierError`
        where it cannot be written.
        """
        from quire.engines.tiered.saved import save_to  # noqa: PLC0415 - needs the extra `tiers`

        self._store.transfers.join()
        self._store.settle()
        return save_to(path, self._over_saved())

    @in_turn
    def load(self, path: str | os.PathLike[str]) -> "Loaded":
        """Bring a saved cache back, as far as there is room: what was used last stays.

        Raises `ConfigError` for what is no saved cache, or one of another model or layout. Damaged
        records are left out, with what follows them.
        """
        from quire.engines.tiered.saved import load_saved  # noqa: PLC0415 - needs the extra `tiers`

        self._store.transfers.join()
        self._store.settle()
        return load_saved(path, self._over_saved())

    @in_turn
    def close(self) -> None:
        """Write what is to be written to tiers, and close those that this cache has opened.

        Tiers that are written back get what is still cached. Using the cache afterwards works,
        without tiers. Twice does nothing.
        """
        self._store.settle()
        below, self._store.tiers = self._store.tiers, None
        if below is not None and self.manager.kernel.log is not None:
            below.offload_all()
        if self.tiers is None:
            return
        if self._owns_tiers:
            self.tiers.close()
        else:
            self.tiers.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.num_bytes for pool in self.pools)

    def memory(self) -> list[GroupMemory]:
        """Return what each layer group has of the memory: blocks, their states and bytes."""
        return group_memory(self.layout, self.manager)

    @in_turn
    def snapshot(self) -> dict[str, Any]:
        """Return the manager's state and the memory of each group as plain data, for `quire inspect`."""
        return self.manager.snapshot() | {"memory": [asdict(group) for group in self.memory()]}

    @in_turn
    def rebalance(self) -> bool:
        """Move memory from layer groups with room to spare to those that lacked it; whether any was.

        Counts what each group was refused, and what prompts missed for want of it, since the last
        call; up to an eighth of a group moves at a time. Costs a copy of the pools that change:
        call it now and then, not in every turn. A model with one group has nothing to move.
        """
        refused = self._store.lacked
        self._store.lacked = [0] * len(refused)
        wanted = self._balance.counts(refused)
        changed = {
            group.name: wanted[group.name]
            for group in self.memory()
            if group.num_blocks != wanted[group.name]
        }
        try:
            self._store.resize(changed)
        except OutOfBlocks:
            return False  # sessions that are open hold what would have moved
        return bool(changed)

    def __repr__(self) -> str:
        used = used_words(self.memory(), self.layout.block_size, self.num_bytes)
        below = "" if self.tiers is None else f", tiers {' > '.join(self.tiers.names)}"
        return (
            f"PrefixCache({type(self.model).__name__}, {used}, "
            f"hit rate {self.stats.hit_rate:.1%}{below})"
        )

    def _over_saved(self) -> "Callable[[TierStack], TieredStore]":
        """Return what makes a store over a saved cache: of whole numbers, under names that hold everywhere."""
        whole = self._weights.whole()
        if self.tiers is None:
            self.manager.kernel.digests.public[self._weights.base()] = whole
        return lambda stack: self._over(stack, whole, None)

    def _over(self, stack: "TierStack", model: str, dtype: str | None) -> "TieredStore":
        from quire.engines.tiered.parts import Origin  # noqa: PLC0415 - needs the extra `tiers`
        from quire.engines.tiered.store import TieredStore  # noqa: PLC0415

        origin = Origin(f"hf {model}", dtype)
        return TieredStore(self.manager, self.pools, self.layout, stack, origin)


def _stack(tiers: "Tiers | None") -> "tuple[TierStack | None, bool]":
    """Return the stack of what was given, and whether it was opened here."""
    if tiers is None or (isinstance(tiers, Sequence) and not tiers):
        return None, False
    try:
        from quire.engines.tiered.opening import open_stack  # noqa: PLC0415 - needs the extra
        from quire.tiers.stack.stack import TierStack  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(lacking("a tier", str(error.name), "hf")) from error
    if isinstance(tiers, TierStack):
        return tiers, False
    return open_stack(tiers), True


def _writes_back(stack: "TierStack") -> bool:
    settings = stack.settings
    return "back" in (settings.write, *(each.write for each in settings.tiers.values()))
