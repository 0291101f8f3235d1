"""`QuireStorage`: by which SGLang's HiCache calls quire."""

# SGLang is not there where types are checked: it has an environment of its own.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolTransferResult,
)

from quire.engines.models.weights import FileDigests, default_kept_at, weight_files
from quire.engines.sglang.pages import HostPages
from quire.engines.tiered.opening import ranked
from quire.engines.tiered.pages import GOOD, PageRecords, PageStack, pieces
from quire.errors import ConfigError

OURS = ("tiers", "settings", "weights")
THEIRS = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "tp_lcm_size",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
)
"""Options of `--hicache-storage-backend-extra-config`: quire's, and those that SGLang reads there itself."""

ARGUMENTS = (
    "model_path",
    "revision",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "quantization_param_path",
    "load_format",
    "json_model_override_args",
    "context_length",
    "speculative_draft_model_path",
)
"""SGLang's arguments that decide what KV means, beside weights and the pools' shapes."""

SHAPE = (
    "layout",
    "dtype",
    "page_size",
    "layer_num",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "start_layer",
    "end_layer",
    "dcp_size",
)
"""What a host pool says of itself."""

KV, MAMBA = "kv", "mamba"

BLOCK_GROUPS = "block_groups"
"""A policy of pools that newer versions of SGLang have."""

MOST_MOVES = 1000
"""Moves of pages that are remembered until SGLang asks for them."""


class QuireStorage(HiCacheStorage):
    """A storage backend of SGLang's HiCache whose pages lie in quire's tiers.

    `--hicache-storage-backend dynamic`, with `backend_name`, `module_path` "quire.engines.sglang", `class_name`
    "QuireStorage", `interface_v1` 1, and:

    `tiers`     lines or tables as `quire.tiers.open_tier` reads them, fastest first; "{rank}" stands for the rank
    `settings`  those of `quire.tiers.StackSettings`
    `weights`   a name of what computes, instead of the digest of its files

    Records are verified by checksum, length, key and shape. SGLang gives the hashes of pages, not their tokens, so that
    these cannot be compared: two prompts with one SHA-256 would be one. `clear` makes this process find nothing that was
    stored before it; call it when weights were changed in memory.

    Raises `ConfigError` for what quire cannot keep, when SGLang starts.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        self._config = storage_config
        extra = self._extra = dict(storage_config.extra_config or {})
        if unknown := sorted(set(extra) - {*OURS, *THEIRS}):
            raise ConfigError(
                f"quire knows no options {unknown} in hicache-storage-backend-extra-config; it has {', '.join(OURS)}"
            )
        if extra.get("interface_v1") != 1:
            raise ConfigError(
                'give "interface_v1": 1 in hicache-storage-backend-extra-config: SGLang makes a tensor of each page '
                f"without, which quire does not take; got {extra.get('interface_v1')!r}"
            )
        lines = extra.get("tiers")
        if not isinstance(lines, list) or not lines:
            raise ConfigError(
                f'give "tiers" in hicache-storage-backend-extra-config, fastest first, got {lines!r}; '
                'for instance ["disk:/var/kv/{rank}?capacity=200GiB"]'
            )
        self._digests = FileDigests(default_kept_at())
        self._salt = ""
        self._pools: dict[str, tuple[HostPages, PageRecords]] = {}
        self._loads: deque[tuple[int, float]] = deque(maxlen=MOST_MOVES)
        self._stores: deque[tuple[int, float]] = deque(maxlen=MOST_MOVES)
        self._host_pools: dict[str, Any] = {}
        self._name()
        tiers = ranked(lines, _rank(storage_config))
        self._stack = PageStack(tiers, extra.get("settings"))

    # Pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, pool: Any) -> None:
        pages = HostPages(pool, name)
        self._host_pools[name] = pool
        self._pools[name] = pages, self._records(name, pages)

    # Pages of host pools

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return _head(self._found(KV, keys, contiguous=True))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._loaded(KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._stored(KV, keys, host_indices)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        num_pages = self.batch_exists(keys)
        hits = {KV: num_pages} if num_pages else {}
        lengths = list(range(1, num_pages + 1))
        for transfer in pool_transfers or []:
            if transfer.hit_policy == BLOCK_GROUPS:  # its own verdict, which limits nobody
                if covered := self._covered(transfer):
                    hits[transfer.name] = covered
                continue
            if not lengths:
                continue
            found = self._found(str(transfer.name), keys[:num_pages], contiguous=False)
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                usable = set(range(1, _head(found) + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                tail = max(1, len(transfer.keys or ()))
                usable = {at for at in lengths if all(found[max(0, at - tail) : at])}
            else:
                raise ConfigError(f"quire knows no hit policy {transfer.hit_policy!r} of SGLang's")
            if usable:
                hits[transfer.name] = max(usable)
            lengths = [at for at in lengths if at in usable]
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def _covered(self, transfer: Any) -> int:
        """Return the pages that the leading whole groups of a pool's keys cover."""
        keys, size = list(transfer.keys or ()), transfer.group_pages
        if size < 1:
            return 0
        found = self._found(str(transfer.name), keys, contiguous=True)
        return _head(found) // size * transfer.block_pages

    def _found(self, name: str, keys: Sequence[str], *, contiguous: bool) -> list[bool]:
        """Return which pages seem to be there. Those just stored are: SGLang asks on a thread that may wait."""
        records = self._of(name)
        self._stack.wait_for(records, keys)
        return self._stack.found(records, keys, contiguous=contiguous)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {x.name: self._loaded(str(x.name), *_asked(x)) for x in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        return {x.name: self._stored(str(x.name), *_asked(x)) for x in transfers}

    def _loaded(self, name: str, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        return self._timed(self._loads, name, keys, indices, self._load)

    def _stored(self, name: str, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        return self._timed(self._stores, name, keys, indices, self._store)

    def _timed(self, moves: deque[tuple[int, float]], name: str, *asked: Any) -> list[bool]:
        """Move pages, and note how many came and at which rate, in GB/s."""
        began_s = time.perf_counter()
        done = self._moved(name, *asked)
        took_s = max(time.perf_counter() - began_s, 1e-9)
        if pages := sum(done):
            moves.append((pages, pages * self._pools[name][1].payload_bytes / took_s / 1e9))
        return done

    def get_stats(self) -> Any:
        """Return pages and rates of loads and stores since the last call, as SGLang exports them."""
        from sglang.srt.observability.metrics_collector import (  # noqa: PLC0415 - only where they are exported
            StorageMetrics,
        )

        metrics = StorageMetrics()
        for moves, pages, rates in (
            (self._loads, metrics.prefetch_pgs, metrics.prefetch_bandwidth),
            (self._stores, metrics.backup_pgs, metrics.backup_bandwidth),
        ):
            while moves:
                num_pages, rate = moves.popleft()
                pages.append(num_pages)
                rates.append(rate)
        return metrics

    def _moved(
        self,
        name: str,
        keys: Sequence[str],
        indices: torch.Tensor | None,
        move: Callable[[PageRecords, Sequence[str], HostPages, torch.Tensor], list[bool]],
    ) -> list[bool]:
        """Load or store pages by `move`, some at a time; return which came, or did not fail."""
        self._rename()
        pages, records = self._pools[name]
        if indices is None or len(indices) != len(keys) * pages.page_size:
            return [False] * len(keys)
        slots = indices.reshape(len(keys), pages.page_size)
        done: list[bool] = []
        for part in pieces(len(keys), records.record_bytes):
            own = slice(part.start, part.stop)
            done += move(records, keys[own], pages, slots[own])
        return done

    def _load(
        self, records: PageRecords, keys: Sequence[str], pages: HostPages, slots: torch.Tensor
    ) -> list[bool]:
        return self._stack.load(records, keys, partial(pages.write, slots.flatten()))

    def _store(
        self, records: PageRecords, keys: Sequence[str], pages: HostPages, slots: torch.Tensor
    ) -> list[bool]:
        def fill(chosen: Sequence[int], payloads: list[memoryview]) -> None:
            pages.read(slots[list(chosen)].flatten(), payloads)

        return [each in GOOD for each in self._stack.store(records, keys, fill)]

    # Plain tensors, which the controller asks for without `interface_v1`

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("quire reads and writes pages of host pools, not tensors")

    get = batch_get = set = batch_set = _refuse

    # Life

    def clear(self) -> bool:
        """Make all stored pages unfindable. Their records are evicted from the tiers over time."""
        self._salt = secrets.token_hex(16)
        self._name()
        return True

    def close(self) -> None:
        """Write queued records, as long as the stack's settings allow, and close the tiers."""
        self._stack.close()

    # Names

    def _name(self) -> None:
        """Say what the KV is of, as it is now; names of all records follow from that."""
        arguments = self._arguments = _arguments()
        weights = self._extra.get("weights")
        if weights is None:
            place = Path(str(arguments.get("model_path") or self._config.model_name or ""))
            weights = self._digests.of(weight_files(place))
        self._facts = {
            "weights": weights,
            "arguments": {name: value for name, value in arguments.items() if name != "model_path"},
            "sglang": _version(),
            "salt": self._salt,
        }
        for name, (pages, _) in list(self._pools.items()):
            self._pools[name] = pages, self._records(name, pages)

    def _rename(self) -> None:
        """Name records anew where SGLang has loaded other weights since."""
        if _arguments() != self._arguments:
            self._name()

    def _records(self, name: str, pages: HostPages) -> PageRecords:
        config, pool = self._config, self._host_pools[name]
        shape = {each: repr(getattr(pool, each, None)) for each in SHAPE}
        ranks = [config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size]
        ranks += [config.dcp_rank, config.dcp_size]
        if not config.is_mla_model or name == MAMBA:  # else all ranks have the same bytes
            ranks += [config.tp_rank, config.tp_size]
        facts = {
            **self._facts,
            "pool": type(pool).__name__,
            "shape": shape,
            "form": pages.form,
            "ranks": ranks,
        }
        page_size = int(getattr(pool, "page_size", 0) or 1)
        dtype = str(getattr(pool, "dtype", "bytes")).removeprefix("torch.")
        return PageRecords(name, pages.num_bytes, page_size, dtype, facts)

    def _of(self, name: str) -> PageRecords:
        self._rename()
        return self._pools[name][1]


def _asked(transfer: Any) -> tuple[list[str], torch.Tensor | None]:
    return list(transfer.keys or ()), transfer.host_indices


def _head(found: Sequence[bool]) -> int:
    return found.index(False) if False in found else len(found)


def _rank(config: HiCacheStorageConfig) -> str:
    """Return this worker's rank: a directory belongs to one process."""
    return f"{config.tp_rank}-{config.pp_rank}-{config.attn_cp_rank}-{config.dp_rank}"


def _arguments() -> dict[str, str]:
    """Return SGLang's own arguments that decide what KV means; none where it does not run."""
    try:
        from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415 - newer versions have it

        arguments = get_server_args()
    except Exception:  # noqa: BLE001 - outside a server nothing is published
        return {}
    return {name: str(getattr(arguments, name, None)) for name in ARGUMENTS}


def _version() -> str:
    try:
        return version("sglang").rsplit(".", 1)[0]
    except PackageNotFoundError:
        return ""
