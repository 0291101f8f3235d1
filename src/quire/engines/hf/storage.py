"""Memory of a cache: pools on the device of its model, tiers below them, saved files."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch

from quire import ops
from quire.budget import EXPECTED_TOKENS
from quire.config import nearest, parse_bytes
from quire.core import CacheManager, Watcher
from quire.core.blocks import BlockPool
from quire.engines.companions import PassageSettings, checked_passages
from quire.engines.hf.memory import GroupMemory, group_memory, named_groups, split_layout
from quire.engines.hf.pools import HfStore
from quire.engines.hf.whole import WholeMedia
from quire.engines.models.identity import Identity, checksum
from quire.engines.models.inventory import Inventory
from quire.engines.models.probe import probe_model
from quire.errors import ConfigError
from quire.exchange import Digests, Spill
from quire.extras import lacking
from quire.foresight import LiveCurve
from quire.tensors.kinds import decoder_config
from quire.tensors.model import ModelLayout
from quire.tensors.pool import make_pool
from quire.tensors.transfers import transfers_to

if TYPE_CHECKING:
    from quire.engines.tiered.opening import Tiers
    from quire.engines.tiered.saved import Loaded
    from quire.engines.tiered.store import TieredStore
    from quire.tiers.stack.stack import TierStack

Verify = Literal["probe", "first"] | None
Capacity = str | int | Mapping[str, int]


class Settings(TypedDict, total=False):
    """Settings of a `PrefixCache`, explained there."""

    policy: Any
    dtype: torch.dtype | None
    expected_tokens: int
    snapshot_interval: int | None
    debug: bool
    clock: Callable[[], float]
    watchers: Sequence[Watcher]
    tiers: "Tiers | None"
    tier_dtype: str | None
    verify: Verify
    passages: PassageSettings | None
    wait_s: float | None


def check_settings(capacity: Capacity, settings: Settings) -> None:
    """Raise `ConfigError` for a setting that there is not, and for those that are wrong by themselves."""
    known = Settings.__annotations__
    for name in settings:
        if name not in known:
            near = nearest(name, {"capacity", "block_size", *known})
            raise ConfigError(f"PrefixCache has no setting {name!r}{near}")
    if not isinstance(capacity, Mapping):
        parse_bytes(capacity)
    checked_passages(settings.get("passages"))
    verify, allowed = settings.get("verify", "probe"), ("probe", "first", None)
    if verify not in allowed:
        raise ConfigError(f"verify={verify!r}; it is one of {', '.join(map(repr, allowed))}")


class KeptBlocks:
    """Pools on the device of a model with their manager, tiers below them, and the identity they are under.

    computed    the layer groups as the model computes them
    before      an inventory of the model from before it was first run
    given       the model as callers have it, or None: `model`
    """

    def __init__(
        self,
        model: Any,
        computed: ModelLayout,
        capacity: Capacity,
        settings: Settings,
        before: Inventory,
        *,
        given: Any = None,
    ) -> None:
        debug = settings.get("debug", False)
        self.model = model
        self.layout = computed.stored_as(settings.get("dtype"))
        groups = (
            named_groups(self.layout, capacity)
            if isinstance(capacity, Mapping)
            else split_layout(
                self.layout,
                parse_bytes(capacity),
                settings.get("expected_tokens", EXPECTED_TOKENS),
            )
        )
        self.pools = [
            make_pool(group.memory, num.num_blocks, model.device, debug_nan=debug)
            for group, num in zip(self.layout.groups, groups, strict=True)
        ]
        self.tiers, self._owns_tiers = stack_of(settings.get("tiers"))
        self._digests = Digests()
        whole = [WholeMedia()] if decoder_config(model.config) is not model.config else []
        own = [*whole, self._digests, LiveCurve(), *watchers_of(self.tiers)]
        manager = CacheManager(
            groups=groups,
            block_size=self.layout.block_size,
            policy=settings.get("policy", "lru"),
            pool=ops.CheckedPool if debug else BlockPool,
            clock=settings.get("clock", time.monotonic),
            watchers=[*own, *settings.get("watchers", ())],
        )
        # What is kept beyond this process is named by all of the weights.
        passages = settings.get("passages")
        read = checksum if self.tiers or (passages and passages.outlives) else None
        verify = lambda: probe_model(model, self.layout.block_size)  # noqa: E731
        self.identity = Identity(model, self.layout, before, verify, read, given=given)
        transfers = transfers_to(model.device)
        self.store = HfStore(manager, self.pools, self.layout, transfers)
        if self.tiers is not None:
            try:
                dtype = settings.get("tier_dtype")
                self.store.tiers = self._over(self.tiers, self.identity.fingerprint, dtype)
                self.store.tiers.transfers = transfers
            except BaseException:
                self.close()
                raise

    @property
    def manager(self) -> CacheManager:
        """The manager of all blocks."""
        return self.store.manager

    def clear(self) -> int:
        """Drop all that is cached, and return how many blocks that were; after `Interrupted`, start anew."""
        dropped = 0
        if self.manager.interrupted:
            self.store.recover()
        else:
            self.store.join()
            dropped = ops.clear(self.manager)
        self.identity.renew()
        return dropped

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write all that is cached into a directory; return how many records that were."""
        from quire.engines.tiered.saved import save_to  # noqa: PLC0415 - needs the extra `tiers`

        self.store.join()
        return save_to(path, self._over_saved(), self.facts())

    def load(self, path: str | os.PathLike[str]) -> "Loaded":
        """Bring a saved cache back, as far as there is room."""
        from quire.engines.tiered.saved import load_saved  # noqa: PLC0415 - needs the extra `tiers`

        self.store.join()
        return load_saved(path, self._over_saved(), self.facts)

    def facts(self) -> dict[str, str]:
        """Return what decides under which names KV is kept, for people to compare."""
        held = {group.name: str(getattr(group.memory, "dtype", "")) for group in self.layout.groups}
        stored = {f"dtype of {name} layers": dtype for name, dtype in held.items() if dtype}
        return {**self.identity.facts(), **stored}

    def close(self) -> None:
        """Write the due blocks to tiers, and close the tiers that were opened here."""
        self.store.settle()
        below, self.store.tiers = self.store.tiers, None
        if below is not None and self.manager.kernel.watchers.find(Spill):
            below.offload_all()
        if self.tiers is None:
            return
        if self._owns_tiers:
            self.tiers.close()
        else:
            self.tiers.flush()

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.num_bytes for pool in self.pools)

    def memory(self) -> list[GroupMemory]:
        """Return the share of each layer group in the memory."""
        return group_memory(self.layout, self.manager)

    def _over_saved(self) -> "Callable[[TierStack], TieredStore]":
        """Return a maker of stores over a saved cache: of whole numbers, under names that hold everywhere."""
        whole = self.identity.whole()
        if self.tiers is None:
            self._digests.public[self.identity.base()] = whole
        return lambda stack: self._over(stack, whole, None)

    def _over(self, stack: "TierStack", model: str, dtype: str | None) -> "TieredStore":
        from quire.engines.tiered.parts import Origin  # noqa: PLC0415 - needs the extra `tiers`
        from quire.engines.tiered.store import TieredStore  # noqa: PLC0415

        origin = Origin(f"hf {model}", dtype)
        return TieredStore(self.manager, self.pools, self.layout, stack, origin)


def stack_of(tiers: "Tiers | None") -> "tuple[TierStack | None, bool]":
    """Return the stack of the given tiers, and whether it was opened here."""
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


def watchers_of(stack: "TierStack | None") -> list[Watcher]:
    """Return what has to watch a manager above these tiers."""
    if stack is None:
        return []
    settings = stack.settings
    writes = {settings.write, *(tier.write for tier in settings.tiers.values())}
    return [Digests(), *([Spill()] if "back" in writes else ())]
