"""`QuireConnector`: by which vLLM calls quire."""

# vLLM is not there where types are checked: it has an environment of its own.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from uuid import uuid4

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from quire.core import MediaItem, Scope
from quire.engines.models.weights import Adapters, FileDigests, default_kept_at
from quire.engines.tiered.opening import open_free, ranked
from quire.engines.vllm.copying import WorkerSide
from quire.engines.vllm.kv_events import removed_events, stored_event
from quire.engines.vllm.metrics import QuirePromMetrics, QuireStats
from quire.engines.vllm.parts import GroupShape, make_parts
from quire.engines.vllm.residency import Residencies
from quire.engines.vllm.scheduling import SchedulerSide, StepCopies
from quire.engines.vllm.staging import StagingSize
from quire.engines.vllm.support import check_supported, model_name
from quire.errors import QuireError
from quire.tiers.opening import to_read
from quire.tiers.stack.stack import TierStack

_log = logging.getLogger("vllm.quire")
"""Below vLLM's logger: its handlers show what quire says."""


@dataclass
class QuireMetadata(KVConnectorMetadata):
    """The copies of workers in one step, if any, and whether the scheduler lacks the shapes of their KV caches."""

    copies: StepCopies | None = None
    asks_shapes: bool = False


@dataclass
class QuireWorkerMetadata(KVConnectorWorkerMetadata):
    """Steps that workers have done: how many of them, and the seconds of the slowest forward.

    `shapes`  of the KV caches of each worker, by rank, where the scheduler asked for them
    """

    steps: dict[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])
    shapes: dict[int, list[GroupShape]] = field(default_factory=dict[int, list[GroupShape]])

    def aggregate(self, other: Any) -> QuireWorkerMetadata:
        self.shapes |= other.shapes
        for step, (count, seconds) in other.steps.items():
            mine = self.steps.get(step, (0, 0.0))
            self.steps[step] = mine[0] + count, max(mine[1], seconds)
        return self


class QuireConnector(KVConnectorBase_V1, SupportsHMA):
    """A KV connector whose blocks lie in quire's tiers.

    `kv_connector_extra_config`:

    `tiers`     lines or tables as `quire.tiers.open_tier` reads them, fastest first; "{rank}" is the data parallel rank
    `settings`  those of `quire.tiers.StackSettings`
    `staging`   memory shared with the workers, for what is on its way; None: see `StagingSize`
    `weights`   a name of what computes, instead of the digest of its files

    A `kv_consumer` stores nothing and opens directories to read only, a `kv_producer` loads nothing. Raises
    `ConfigError` for what quire cannot keep, when vLLM starts.

    The scheduler learns the shapes of the KV caches from the workers' first step, not by vLLM's handshake:
    `MultiConnector` hands on the handshake of one connector to all.
    """

    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._extra: dict[str, Any] = self._kv_transfer_config.kv_connector_extra_config or {}
        self._groups = kv_cache_config.kv_cache_groups
        check_supported(vllm_config, self._groups, self._extra)
        self._block_size = self._groups[0].kv_cache_spec.block_size
        self._shapes: list[list[GroupShape]] = []
        self._stack: TierStack | None = None
        self._side: SchedulerSide | None = None
        self._early: set[str] = set()
        self._worker: WorkerSide | None = None
        self._done: dict[int, tuple[int, float]] = {}
        self._digests = FileDigests(default_kept_at())
        self._adapters = Adapters(self._digests)
        self._requests: dict[str, Any] = {}
        if role == KVConnectorRole.SCHEDULER:  # now, as vLLM has just read the files
            self._model = self._weights = model_name(vllm_config, self._extra, self._digests)
            self._stack = self._open()

    def _open(self) -> TierStack | None:
        """Open the tiers; None where none is left."""
        rank = self._vllm_config.parallel_config.data_parallel_index
        tiers = ranked(self._extra.get("tiers", ()), str(rank))
        if not self._kv_transfer_config.is_kv_producer:
            tiers = [to_read(each) for each in tiers]
        return open_free(tiers, self._extra.get("settings"))

    # Workers

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = self._vllm_config.compilation_config.static_forward_context
        groups = [
            (group.layer_names, _window(group.kv_cache_spec), _layout(layers, group))
            for group in self._groups
        ]
        rank = self._vllm_config.parallel_config.rank
        num_blocks = self._kv_cache_config.num_blocks
        self._worker = WorkerSide(kv_caches, groups, num_blocks, rank)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        copies = self._copies()
        if copies is not None and copies.loads:
            assert self._worker is not None
            self._worker.load(copies)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all layers are there before the forward."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are copied when all layers are computed."""

    def wait_for_save(self) -> None:
        copies = self._copies()
        if copies is not None:
            assert self._worker is not None
            self._done[copies.step] = 1, self._worker.save(copies)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        done, self._done = self._done, {}
        told = QuireWorkerMetadata(done)
        if self._worker is not None and self._connector_metadata.asks_shapes:
            told.shapes[self._vllm_config.parallel_config.rank] = self._worker.shapes
        return told if done or told.shapes else None

    # The scheduler

    def _begin(self, shapes: dict[int, list[GroupShape]]) -> None:
        """Take the shapes of all workers' KV caches; from now on requests are looked up."""
        assert self._stack is not None
        self._shapes = [shapes[rank] for rank in sorted(shapes)]
        parts = make_parts(self._shapes, self._model, self._block_size, self._stack.settings.key)
        staging = StagingSize(parts, self._vllm_config, self._extra.get("staging"))
        self._side = SchedulerSide(self._stack, parts, staging.num_bytes, len(self._shapes))
        staging.say(self._stack)
        events = self._vllm_config.kv_events_config
        if events is not None and events.enable_kv_cache_events:
            self._side.told = Residencies(self._stack.tiers[-1])
            self._side.describe = self._described
        for request in self._early:
            self._side.arrived(request)
        self._early.clear()

    def on_new_request(self, request: Any) -> None:
        if self._side is not None:
            self._side.arrived(request.request_id)
        elif self._stack is not None:
            self._early.add(request.request_id)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._side is None:
            return (0 if self._stack is None else None), False
        if not self._follow(request) or request.skip_reading_prefix_cache:
            return 0, False
        if not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        num_tokens = request.num_tokens
        return self._side.matched(request.request_id, num_tokens, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._side is not None and num_external_tokens:
            ids = blocks.get_block_ids()
            self._side.allocated(request.request_id, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._side is None:
            return QuireMetadata(asks_shapes=self._stack is not None)
        cached = scheduler_output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {
            new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
        }
        counts = scheduler_output.num_scheduled_tokens
        scheduled = {request: (starts[request], count) for request, count in counts.items()}
        blocks_of = scheduler_output.kv_connector_block_state.resolve_block_ids
        copies = self._side.step(
            scheduled, lambda request: self._requests[request].all_token_ids, blocks_of
        )
        return QuireMetadata(copies)

    def update_connector_output(self, connector_output: Any) -> None:
        done = connector_output.kv_connector_worker_meta
        if done is None:
            return
        size = self._vllm_config.parallel_config.tensor_parallel_size
        if self._side is None and len(done.shapes) == size:
            self._begin(done.shapes)
        if self._side is not None:
            for step, (count, seconds) in done.steps.items():
                self._side.done(step, count, seconds)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        self._early.discard(request.request_id)
        if self._side is not None:
            self._side.ended(request.request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        """Find nothing any more that is stored: vLLM's weights may have been replaced where they are."""
        if self._stack is not None:
            self._model = f"{self._weights} {uuid4().hex}"
        if self._side is not None:
            key = self._side.stack.settings.key
            self._side.rename(make_parts(self._shapes, self._model, self._block_size, key))
        return True

    def shutdown(self) -> None:
        if self._side is not None:
            self._side.close()
        elif self._stack is not None:
            self._stack.close()

    # Events

    def take_events(self) -> Iterable[Any]:
        """Return KV events of blocks that came into tiers, and that left the slowest one."""
        if self._side is None or self._side.told is None:
            return
        came, gone = self._side.told.take()
        yield from came
        yield from removed_events(gone)

    def _described(self, request: str, at: int, group: int) -> tuple[Any, Any] | None:
        return stored_event(self._requests[request], at, group, self._groups[group].kv_cache_spec)

    # Metrics

    def get_kv_connector_stats(self) -> QuireStats | None:
        if self._side is None:
            return None
        told: dict[str, Any] = dict(self._side.take_counts())
        if tiers := self._side.take_figures():
            told["tiers"] = tiers
        return QuireStats(data=told) if told else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> QuireStats:
        return QuireStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> QuirePromMetrics:
        return QuirePromMetrics(*args)

    # Helpers

    def _copies(self) -> StepCopies | None:
        return self._connector_metadata.copies if self.has_connector_metadata() else None

    def _follow(self, request: Any) -> bool:
        """Follow a request, and return whether its blocks can be named."""
        if request.request_id in self._requests:
            return True
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return False  # what was embedded elsewhere has no name
        if getattr(request, "resumable", False):
            return False  # its prompt may still change
        lora = request.lora_request
        adapter = None
        if lora is not None:
            adapter = self._adapters.digest(
                lora.lora_int_id, lora.lora_path, in_place=lora.load_inplace
            )
            if adapter is None:
                return False
        assert self._side is not None
        try:
            scope = Scope(salt=request.cache_salt, lora=adapter)
            media = media_of(request.mm_features)
            tokens, stores = request.all_token_ids[:], self._kv_transfer_config.is_kv_producer
            self._side.follow(request.request_id, tokens, scope, media, stores=stores)
        except (
            QuireError
        ):  # what has no name is served without quire: an error here would end the engine
            _log.warning("a request cannot be named, so it is not cached", exc_info=True)
            return False
        self._requests[request.request_id] = request
        return True


def media_of(features: Any) -> list[MediaItem]:
    """Return the media of a request, by what vLLM says identifies their contents."""
    return [
        MediaItem(
            sha256(f"{each.modality}\0{each.identifier}".encode()).digest(),
            each.mm_position.offset,
            each.mm_position.length,
        )
        for each in features
    ]


def _window(spec: Any) -> int:
    if type(spec).__name__ != "SlidingWindowSpec":
        return 0
    return spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)


def _layout(layers: Any, group: Any) -> str:
    """Return how attention lays out a block: its name, and on CPUs the instruction set that packs for."""
    kinds = {
        f"{layers[name].get_attn_backend().get_name()} {getattr(layers[name], 'isa', '')}"
        for name in group.layer_names
    }
    return " ".join(sorted(kinds))


def _register() -> None:
    """Let vLLM find the connector by its name: it makes the stats of one below `MultiConnector` anew by that."""
    name = QuireConnector.__name__
    try:
        KVConnectorFactory.get_connector_class_by_name(name)
    except ValueError:
        KVConnectorFactory.register_connector(name, __name__, name)


_register()
