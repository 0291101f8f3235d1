"""`QuireL2Adapter`: by which LMCache calls quire."""

# LMCache is not there where types are checked: it has an environment of its own.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from quire.engines.tiered.opening import ranked
from quire.engines.tiered.pages import GOOD, PageRecords, PageStack, pieces
from quire.errors import ConfigError
from quire.tiers.base import Outcome

OPTIONS = ("tiers", "settings", "weights", "rank")

THREADS = 4
"""Lookups and loads at once."""

FORM_BYTES = 32
"""Bytes before an object's own: a digest of its types and shapes."""

MOST_SIZES = 64
"""Sizes of objects whose record forms are remembered, by model."""

_log = logging.getLogger("lmcache.quire")


class ObjectRecords(PageRecords):
    """The records of LMCache's objects of one size: `FORM_BYTES`, then their bytes."""

    engine = "lmcache"


class _Results:
    """Results of finished tasks by their ids, and the event that says that one has finished."""

    def __init__(self) -> None:
        self.event = create_event_notifier()
        self._results: dict[int, Any] = {}
        self._lock = threading.Lock()

    def put(self, task: int, result: Any) -> None:
        with self._lock:
            self._results[task] = result
        self.event.notify()

    def pop(self, task: int) -> Any:
        with self._lock:
            return self._results.pop(task, None)

    def pop_all(self) -> dict[int, Any]:
        with self._lock:
            results, self._results = self._results, {}
        return results


class QuireL2Adapter(L2AdapterInterface):
    """An L2 adapter of LMCache whose objects lie in quire's tiers.

    `{"type": "plugin", "module_path": "quire.engines.lmcache", "class_name": "QuireL2Adapter", "adapter_params": {...}}`, with:

    `tiers`     lines or tables as `quire.tiers.open_tier` reads them, fastest first; "{rank}" is `rank`
    `weights`   a name of what computes: LMCache's keys name a model, not its weights
    `settings`  those of `quire.tiers.StackSettings`
    `rank`      text in place of "{rank}", for several servers on one machine

    An object is its own bytes when it is loaded: checksum, length, key, types and shapes are verified. Nothing is locked:
    an object that a tier has dropped since its lookup is a miss of the load. Raises `ConfigError` for unknown options.
    """

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        if unknown := sorted(set(config) - set(OPTIONS)):
            raise ConfigError(
                f"adapter_params of QuireL2Adapter have no option {', '.join(unknown)}; options: {', '.join(OPTIONS)}"
            )
        tiers, self._weights = config.get("tiers"), config.get("weights")
        if not isinstance(tiers, (list, tuple)) or not tiers:
            raise ConfigError(
                f'give "tiers" in adapter_params, fastest first, got {tiers!r}; for instance '
                '["disk:/var/kv?capacity=200GiB"]'
            )
        if not isinstance(self._weights, str) or not self._weights:
            raise ConfigError(
                f'give "weights" in adapter_params, a name of the checkpoint, another one for each change, got {self._weights!r}: '
                "LMCache's keys name a model, and not its weights"
            )
        self._stack = PageStack(ranked(tiers, str(config.get("rank", "0"))), config.get("settings"))
        self._forms: dict[tuple[str, int], ObjectRecords] = {}
        self._numbers = itertools.count(1)
        self._stored, self._looked_up, self._loaded = _Results(), _Results(), _Results()
        self._reads = ThreadPoolExecutor(THREADS, "quire-read")
        self._writes = ThreadPoolExecutor(1, "quire-store")

    # Events

    def get_store_event_fd(self) -> int:
        return self._stored.event.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._looked_up.event.fileno()

    def get_load_event_fd(self) -> int:
        return self._loaded.event.fileno()

    # Stores

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(self._writes, self._stored, self._store, keys, objects)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stored.pop_all()

    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> L2StoreResult:
        took: list[Any] = []
        sizes: list[int] = []
        is_good = True
        for places in self._alike(keys, objects):
            outcomes = self._stored_alike(
                [keys[at] for at in places], [objects[at] for at in places]
            )
            for at, outcome in zip(places, outcomes, strict=True):
                is_good = is_good and outcome in GOOD
                if outcome is Outcome.STORED:
                    took.append(keys[at])
                    sizes.append(objects[at].get_size())
        if took:
            self._notify_keys_stored(took, sizes)
        return L2StoreResult(is_good, sum(sizes))

    def _stored_alike(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[Outcome]:
        def fill(chosen: Sequence[int], payloads: list[memoryview]) -> None:
            for at, payload in zip(chosen, payloads, strict=True):
                payload[:FORM_BYTES] = _form_of(objects[at])
                np.copyto(np.frombuffer(payload[FORM_BYTES:], np.uint8), _bytes_of(objects[at]))

        records = self._records(keys[0].model_name, objects[0].get_size())
        return self._stack.store(records, [*map(_name, keys)], fill)

    # Lookups

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: dict[int, Any]
    ) -> int:
        return self._submit(self._reads, self._looked_up, self._look_up, keys, ())

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._looked_up.pop(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing: nothing was locked."""

    def _look_up(self, keys: Sequence[Any], _: object) -> Bitmap:
        bits = Bitmap(len(keys))
        for model in {key.model_name for key in keys}:
            places = [at for at, key in enumerate(keys) if key.model_name == model]
            names = [_name(keys[at]) for at in places]
            found = self._stack.found(self._records(model, 0), names, contiguous=False)
            for at, is_found in zip(places, found, strict=True):
                if is_found:
                    bits.set(at)
        return bits

    # Loads

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(self._reads, self._loaded, self._load, keys, objects)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loaded.pop(task_id)

    def _load(self, keys: Sequence[Any], objects: Sequence[Any]) -> Bitmap:
        bits = Bitmap(len(keys))
        came: list[Any] = []
        for places in self._alike(keys, objects):
            mine = [objects[at] for at in places]
            loaded = self._loaded_alike([keys[at] for at in places], mine)
            for at in itertools.compress(places, loaded):
                bits.set(at)
                came.append(keys[at])
        if came:
            self._notify_keys_accessed(came)
        return bits

    def _loaded_alike(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[bool]:
        is_ours = [False] * len(keys)

        def fill(payloads: Sequence[memoryview | None]) -> None:
            for at, payload in enumerate(payloads):
                if payload is not None and payload[:FORM_BYTES] == _form_of(objects[at]):
                    np.copyto(_bytes_of(objects[at]), np.frombuffer(payload[FORM_BYTES:], np.uint8))
                    is_ours[at] = True

        records = self._records(keys[0].model_name, objects[0].get_size())
        self._stack.load(records, [*map(_name, keys)], fill)
        return is_ours

    # Life

    def delete(self, keys: list[Any]) -> None:
        stack = self._stack.open_stack
        if stack is None or not keys:
            return
        stack.delete([self._records(key.model_name, 0).page_key(_name(key)) for key in keys])
        self._notify_keys_deleted(keys, [0] * len(keys))

    def get_usage(self) -> AdapterUsage:
        """Return the bytes in all tiers; quire makes room itself, so LMCache is told no capacity."""
        stack = self._stack.open_stack
        tiers = stack.stats(is_settled=False).tiers if stack is not None else []
        return AdapterUsage(sum(max(each.tier.num_bytes, 0) for each in tiers), 0)

    def report_status(self) -> dict[str, Any]:
        stack = self._stack.open_stack
        tiers = stack.stats(is_settled=False).tiers if stack is not None else []
        states = {
            each.tier.name: {
                "reading": each.reading,
                "writing": each.writing,
                "records": each.tier.num_records,
                "bytes": each.tier.num_bytes,
                "queued_bytes": each.queued_bytes,
                "dropped": each.dropped,
            }
            for each in tiers
        }
        healthy = any(each["reading"] == "closed" for each in states.values())
        return {"is_healthy": healthy, "type": type(self).__name__, "tiers": states}

    def close(self) -> None:
        """End tasks that are running, store what is queued, and close the tiers."""
        self._reads.shutdown(cancel_futures=True)
        self._writes.shutdown()
        self._stack.close()
        for each in (self._stored, self._looked_up, self._loaded):
            each.event.close()

    # Helpers

    def _submit(
        self,
        threads: ThreadPoolExecutor,
        results: _Results,
        work: Callable[[Sequence[Any], Sequence[Any]], Any],
        keys: Sequence[Any],
        objects: Sequence[Any],
    ) -> int:
        """Have a thread do a task; return its id. Its result comes, whatever happens."""
        task = next(self._numbers)

        def run() -> None:
            try:
                result = work(keys, objects)
            except Exception:  # noqa: BLE001 - LMCache waits for the result of every task
                _log.exception("a task of the L2 adapter failed")
                result = L2StoreResult(False, 0) if results is self._stored else Bitmap(len(keys))
            results.put(task, result)

        threads.submit(run)
        return task

    def _alike(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[list[int]]:
        """Return the places of objects of one model and size, in pieces of bounded memory."""
        groups: dict[tuple[str, int], list[int]] = {}
        for at, (key, each) in enumerate(zip(keys, objects, strict=True)):
            groups.setdefault((key.model_name, each.get_size()), []).append(at)
        return [
            places[part.start : part.stop]
            for (_, size), places in groups.items()
            for part in pieces(len(places), size + FORM_BYTES)
        ]

    def _records(self, model: str, size: int) -> ObjectRecords:
        """Return the form of records of a model's objects; the key of one does not depend on its size."""
        form = self._forms.get((model, size))
        if form is None:
            if len(self._forms) >= MOST_SIZES:
                self._forms = {}
            facts = {"model": model, "weights": self._weights}
            form = ObjectRecords("objects", FORM_BYTES + size, 1, "bytes", facts)
            self._forms[model, size] = form
        return form


def _name(key: Any) -> bytes:
    """Return the name of an object within its model."""
    fields = (key.chunk_hash, key.kv_rank, key.object_group_id, key.cache_salt)
    return msgspec.msgpack.encode(fields)


def _form_of(each: Any) -> bytes:
    """Return a digest of an object's types, shapes and layout."""
    facts = each.metadata
    types = [str(one) for one in facts.dtypes or [facts.dtype]]
    shapes = [[*one] for one in facts.shapes or [facts.shape]]
    return sha256(repr([types, shapes, str(facts.fmt)]).encode()).digest()


def _bytes_of(each: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """View the bytes of an object; copies of arrays give up the interpreter lock."""
    return np.frombuffer(each.byte_array, np.uint8, each.get_size())
