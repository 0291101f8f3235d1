"""`QuireTier`: a secondary tier of vLLM's own offloading whose chunks lie in quire's tiers."""

# vLLM is not there where types are checked: it has an environment of its own.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from quire.engines.models.weights import FileDigests, default_kept_at, weight_files
from quire.engines.tiered.opening import ranked
from quire.engines.tiered.pages import GOOD, PageRecords, PageStack, pieces
from quire.engines.vllm.figures import COUNTS, STATES, TierFigures
from quire.engines.vllm.residency import Residencies, StoredRecord
from quire.engines.vllm.staging import fitting
from quire.engines.vllm.support import version_of_vllm
from quire.errors import ConfigError
from quire.tiers.base import Outcome

OPTIONS = ("tiers", "settings", "weights", "locality", "enable_kv_events")

LOADS = 4
"""Jobs that are loaded at once; chunks of one job are loaded together."""

HASH_BYTES = 32
"""Bytes of a name of a block by SHA-256; names of other lengths are of hashes that collide."""

THERE = (Outcome.HIT, Outcome.STORED, Outcome.PRESENT)
"""The outcomes of a chunk that is in the tiers."""

Work: TypeAlias = Callable[[Sequence[OffloadKey], Sequence[int]], list[Outcome]]
"""Moves chunks by their keys and places in host memory."""

_log = logging.getLogger("vllm.quire")


class ChunkRecords(PageRecords):
    """The records of vLLM's chunks: all workers' bytes of some blocks of one layer group."""

    engine = "vllm offloading"


class _Done(NamedTuple):
    """The end of a job: what became of each of its keys, and the seconds that it took."""

    job: TransferJob
    outcomes: list[Outcome]
    seconds: float


class _Lookups(AsyncLookupManager):
    """vLLM's lookups beside its steps, which ask quire's tiers."""

    def __init__(self, tier_type: str, found: Callable[[Sequence[OffloadKey]], list[bool]]) -> None:
        self._found = found
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._found(keys)


class QuireTier(SecondaryTierManager):
    """A secondary tier of vLLM's `TieringOffloadingSpec` whose chunks lie in quire's tiers.

    `{"type": "QuireTier", "module_path": "quire.engines.vllm"}` in `secondary_tiers`, with:

    `tiers`             lines or tables as `quire.tiers.open_tier` reads them, fastest first; "{rank}" is the data parallel rank
    `settings`          those of `quire.tiers.StackSettings`
    `weights`           a name of what computes, beside the digest of the model's files
    `locality`          "LOCAL" or "REMOTE": what KV events say of it
    `enable_kv_events`  tell what is stored and removed, where vLLM publishes KV events

    vLLM copies between its pool and host memory; quire copies between that memory and records, which it verifies before
    vLLM hears of them. vLLM gives the hashes of blocks, not their tokens. Raises `ConfigError` for unknown options, and
    for a model without files whose `weights` have no name.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if unknown := sorted(set(options) - set(OPTIONS)):
            raise ConfigError(
                f"the secondary tier {tier_type} has no option {', '.join(unknown)}; options: {', '.join(OPTIONS)}"
            )
        tiers = options.get("tiers")
        if not isinstance(tiers, (list, tuple)) or not tiers:
            raise ConfigError(
                f'give "tiers" of the secondary tier {tier_type}, fastest first, got {tiers!r}; '
                'for instance ["disk:/var/kv/{rank}?capacity=200GiB"]'
            )
        locality = options.get("locality")
        self.locality = Locality(locality) if locality is not None else None
        blocks = int(offloading_spec.blocks_per_chunk)
        self._chunk_tokens = blocks * max(offloading_spec.tokens_per_block)
        self._records = self._form(options.get("weights"))
        rank = offloading_spec.config.parallel.data_parallel_index
        self._stack = PageStack(ranked(tiers, str(rank)), options.get("settings"))
        self._events: Residencies[OffloadKey, OffloadKey] | None = None
        self._figures: TierFigures | None = None
        if (opened := self._stack.open_stack) is not None:
            self._figures = TierFigures(opened, time.monotonic)
            fits = fitting(opened, self.block_size_bytes / self._chunk_tokens)
            _log.info("quire keeps chunks of %d tokens: %s", self._chunk_tokens, ", ".join(fits))
            told = offloading_spec.kv_events_config.enable_kv_cache_events
            if options.get("enable_kv_events") and told:
                self._events = Residencies(opened.tiers[-1])
        self._warned = False
        self._lookups = _Lookups(tier_type, self._found)
        self._loads = ThreadPoolExecutor(LOADS, "quire-load")
        self._stores = ThreadPoolExecutor(1, "quire-store")
        self._running: set[Future[None]] = set()
        self._done: SimpleQueue[_Done] = SimpleQueue()

    def _form(self, named: object) -> ChunkRecords:
        """Return the form of records, from all that decides what a chunk's bytes mean."""
        spec = self._offloading_spec
        config = spec.config
        try:
            files: object = FileDigests(default_kept_at()).of(weight_files(Path(config.model.name)))
        except ConfigError:
            if named is None:
                raise ConfigError(
                    f"{config.model.name!r} is no folder, and vLLM tells a tier no revision, so nothing says what its KV is "
                    'of; name it in the secondary tier: {"weights": "..."}, another name for each change'
                ) from None
            files = None
        mapper = FileMapper.from_offloading_spec(
            root_dir="",
            offloading_spec=spec,
            blocks_per_file=spec.blocks_per_chunk,
            parallel_agnostic=True,
        )
        facts = {name: value for name, value in mapper.fields.items() if name != "model_name"} | {
            "weights": [files, named],
            "rank": mapper.rank,
            "layout": config.kv_cache_layout,
            "vllm": version_of_vllm().rsplit(".", 1)[0],
        }
        return ChunkRecords(
            "chunks", self.block_size_bytes, self._chunk_tokens, config.model.dtype, facts
        )

    # Lookups

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        stack = self._stack.open_stack
        if stack is None or not self._is_named(key):
            return LookupResult.MISS
        if stack.surely_lacks(self._records.page_key(key)):
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def _found(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self._stack.found(self._records, keys, contiguous=False)

    def _is_named(self, key: OffloadKey) -> bool:
        """Return whether the name of a chunk is of a hash that does not collide; warn once."""
        is_named = len(key) == HASH_BYTES + 4
        if not is_named and not self._warned:
            self._warned = True
            _log.warning(
                "quire keeps blocks that are named by SHA-256 alone, got names of %d bytes; "
                "set --prefix-caching-hash-algo to sha256 or sha256_cbor",
                len(key) - 4,
            )
        return is_named

    # Jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._stores, self._store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._loads, self._load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results: list[JobResult] = []
        while not self._done.empty():
            job, outcomes, seconds = self._done.get_nowait()
            good = (Outcome.HIT,) if job.is_promotion else GOOD
            ended = list(zip(job.keys, outcomes, strict=True))
            keys = [key for key, outcome in ended if outcome in good]
            if job.is_promotion:
                self._lookups.mark_miss([key for key, outcome in ended if outcome not in good])
            if self._events is not None:
                there = [key for key, outcome in ended if outcome in THERE]
                self._events.stored(
                    StoredRecord(self._records.page_key(key), key, key) for key in there
                )
            results.append(
                JobResult(
                    job_id=job.job_id,
                    success=len(keys) == len(ended),
                    successful_keys=tuple(keys) or None if job.is_promotion else None,
                    transfer_time=seconds,
                    transfer_bytes=len(keys) * self.block_size_bytes,
                )
            )
        return results

    def has_pending_work(self) -> bool:
        return bool(self._running)

    def drain_jobs(self) -> None:
        wait(list(self._running))

    def _submit(self, threads: ThreadPoolExecutor, work: Work, job: TransferJob) -> None:
        future = threads.submit(self._work, work, job)
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    def _work(self, work: Work, job: TransferJob) -> None:
        """Do a job in pieces of bounded memory, and queue its end, whatever happens."""
        began_s = time.monotonic()
        keys, chunks = list(job.keys), [int(each) for each in job.chunk_ids]
        outcomes: list[Outcome] = []
        try:
            for part in pieces(len(keys), self._records.record_bytes):
                own = slice(part.start, part.stop)
                outcomes += work(keys[own], chunks[own])
        except Exception:  # noqa: BLE001 - vLLM waits for the end of every job
            _log.exception("job %s of the secondary tier %s failed", job.job_id, self.tier_type)
        outcomes += [Outcome.ERROR] * (len(keys) - len(outcomes))
        self._done.put(_Done(job, outcomes, time.monotonic() - began_s))

    def _load(self, keys: Sequence[OffloadKey], chunks: Sequence[int]) -> list[Outcome]:
        def fill(payloads: Sequence[memoryview | None]) -> None:
            for chunk, payload in zip(chunks, payloads, strict=True):
                if payload is not None:
                    np.copyto(self._chunk(chunk), np.frombuffer(payload, np.uint8))

        came = self._stack.load(self._records, keys, fill)
        return [Outcome.HIT if each else Outcome.ABSENT for each in came]

    def _store(self, keys: Sequence[OffloadKey], chunks: Sequence[int]) -> list[Outcome]:
        def fill(chosen: Sequence[int], payloads: list[memoryview]) -> None:
            for at, payload in zip(chosen, payloads, strict=True):
                np.copyto(np.frombuffer(payload, np.uint8), self._chunk(chunks[at]))

        if not all(map(self._is_named, keys)):
            return [Outcome.SKIPPED] * len(keys)
        return self._stack.store(self._records, keys, fill)

    def _chunk(self, chunk: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """View a chunk of vLLM's host memory; copies of arrays give up the interpreter lock."""
        size = self.block_size_bytes
        return np.frombuffer(self._primary_kv_view.cast("B"), np.uint8, size, chunk * size)

    # Events, figures, life

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events is None:
            return
        for removed, keys in enumerate(self._events.take()):
            if keys:
                yield OffloadingEvent(
                    keys,
                    self.medium,
                    removed=bool(removed),
                    locality=self.locality,
                    ownership=self.tier_type,
                    removal_expected=self._events.tells_ends,
                )

    @classmethod
    def build_metric_definitions(
        cls,
        extra_config: dict[str, Any],  # noqa: ARG003 - vLLM gives it
    ) -> dict[str, OffloadingMetricMetadata]:
        counts = {
            metric_name(name): OffloadingCounterMetadata(text, ("tier",))
            for name, text in COUNTS.items()
        }
        return counts | {
            metric_name(name): OffloadingGaugeMetadata(text, ("tier",))
            for name, text in STATES.items()
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        figures = self._figures.take() if self._figures is not None else {}
        if not figures:
            return None
        stats = OffloadingConnectorStats()
        for tier, told in figures.items():
            for name in COUNTS:
                stats.increase_counter(metric_name(name), max(told[name], 0), (tier,))
            for name in STATES:
                stats.set_gauge(metric_name(name), told[name], (tier,))
        return stats

    def shutdown(self) -> None:
        """End loads that are running, store what is queued, and close the tiers."""
        self._lookups.shutdown()
        self._loads.shutdown(cancel_futures=True)
        self._stores.shutdown()
        self._stack.close()


def metric_name(name: str) -> str:
    """Return the name under which vLLM exports a figure of quire's tiers."""
    return f"vllm:kv_offload_quire_{name}"
