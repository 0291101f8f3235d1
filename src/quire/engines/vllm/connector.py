"""`QuireConnector`: by which vLLM calls quire."""

# vLLM is not there where types are checked: it has an environment of its own.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from quire.config import parse_bytes
from quire.core import MediaItem, Scope
from quire.engines.models.weights import (
    Adapters,
    FileDigests,
    default_kept_at,
    fingerprint,
    weight_files,
)
from quire.engines.tiered.opening import open_free
from quire.engines.vllm.copying import WorkerSide
from quire.engines.vllm.metrics import QuirePromMetrics, QuireStats
from quire.engines.vllm.parts import GroupShape, make_parts
from quire.engines.vllm.scheduling import SchedulerSide, StepCopies
from quire.errors import ConfigError, QuireError

_log = logging.getLogger(__name__)

STAGING = "512MiB"
"""The arena: what is loaded or stored at a time; no hit is longer."""

OPTIONS = ("tiers", "settings", "staging", "weights")

GROUPS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")
"""The layer groups of vLLM that quire keeps."""


@dataclass
class QuireMetadata(KVConnectorMetadata):
    """The copies of workers in one step, if any."""

    copies: StepCopies | None = None


@dataclass
class QuireHandshake(KVConnectorHandshakeMetadata):
    """The shapes of a worker's KV caches."""

    shapes: list[GroupShape]


@dataclass
class QuireWorkerMetadata(KVConnectorWorkerMetadata):
    """Steps that workers have done: how many of them, and the seconds of the slowest forward."""

    steps: dict[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])

    def aggregate(self, other: Any) -> QuireWorkerMetadata:
        for step, (count, seconds) in other.steps.items():
            mine = self.steps.get(step, (0, 0.0))
            self.steps[step] = mine[0] + count, max(mine[1], seconds)
        return self


class QuireConnector(KVConnectorBase_V1, SupportsHMA):
    """A KV connector whose blocks lie in quire's tiers.

    `kv_connector_extra_config`:

    `tiers`     lines or tables as `quire.tiers.open_tier` reads them, fastest first
    `settings`  those of `quire.tiers.StackSettings`
    `staging`   memory shared with the workers, for what is on its way
    `weights`   a name of what computes, instead of the digest of its files

    Raises `ConfigError` for what quire cannot keep, when vLLM starts.
    """

    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._extra: dict[str, Any] = self._kv_transfer_config.kv_connector_extra_config or {}
        self._groups = kv_cache_config.kv_cache_groups
        check_supported(vllm_config, self._groups, self._extra)
        self._block_size = self._groups[0].kv_cache_spec.block_size
        self._shapes: list[list[GroupShape]] = []
        self._side: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._done: dict[int, tuple[int, float]] = {}
        self._digests = FileDigests(default_kept_at())
        self._adapters = Adapters(self._digests)
        self._requests: dict[str, Any] = {}
        if role == KVConnectorRole.SCHEDULER:  # now, as vLLM has just read the files
            self._model = model_name(vllm_config, self._extra, self._digests)

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

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return QuireHandshake(self._worker.shapes) if self._worker is not None else None

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
        return QuireWorkerMetadata(done) if done else None

    # The scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        stack = open_free(self._extra.get("tiers", ()), self._extra.get("settings"))
        if stack is None:
            return
        try:
            self._shapes = [metadata[rank].shapes for rank in sorted(metadata)]
            parts = make_parts(self._shapes, self._model, self._block_size, stack.settings.key)
            staging = parse_bytes(self._extra.get("staging", STAGING))
            self._side = SchedulerSide(stack, parts, staging, len(self._shapes))
        except BaseException:
            stack.close()
            raise

    def on_new_request(self, request: Any) -> None:
        if self._side is not None:
            self._side.arrived(request.request_id)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._side is None or not self._follow(request):
            return 0, False
        num_tokens = request.num_tokens
        return self._side.matched(request.request_id, num_tokens, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._side is not None and num_external_tokens:
            ids = blocks.get_block_ids()
            self._side.allocated(request.request_id, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._side is None:
            return QuireMetadata()
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
        if self._side is not None and done is not None:
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
        if self._side is not None:
            self._side.ended(request.request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        """Find nothing any more that is stored: vLLM's weights may have been replaced where they are."""
        if self._side is not None:
            key, model = self._side.stack.settings.key, f"{self._model} {uuid4().hex}"
            self._side.rename(make_parts(self._shapes, model, self._block_size, key))
        return True

    def shutdown(self) -> None:
        if self._side is not None:
            self._side.close()

    # Metrics

    def get_kv_connector_stats(self) -> QuireStats | None:
        counts = self._side.take_counts() if self._side is not None else {}
        return QuireStats(data=counts) if counts else None

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
            self._side.follow(request.request_id, request.all_token_ids[:], scope, media)
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


def check_supported(config: Any, groups: Any, extra: dict[str, Any]) -> None:
    """Raise `ConfigError` for what quire cannot keep, and for options that it does not know."""
    unknown = sorted(set(extra) - set(OPTIONS))
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config has no option {', '.join(unknown)}; options: {', '.join(OPTIONS)}"
        )
    parallel = config.parallel_config
    others = (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "nnodes",
    )
    for name in others:
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                f"quire keeps no KV with {name} = {getattr(parallel, name)}; set it to 1"
            )
    size = parallel.tensor_parallel_size
    heads = config.model_config.get_total_num_kv_heads()
    if size > 1 and (heads % size or config.model_config.use_mla):
        raise ConfigError(
            f"{size} workers (tensor_parallel_size) do not share {heads} KV heads evenly: quire keeps each head once"
        )
    speculative = config.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "ngram_gpu", "suffix"):
        raise ConfigError(
            f"quire keeps no KV of a drafting model (speculative method {speculative.method!r}): it depends on "
            "tokens behind the block; use ngram, or none"
        )
    for group in groups:
        kind = type(group.kv_cache_spec).__name__
        if kind not in GROUPS:
            raise ConfigError(f"quire keeps {', '.join(GROUPS)}; this model has layers of {kind}")
    sizes = sorted({group.kv_cache_spec.block_size for group in groups})
    if len(sizes) > 1:
        raise ConfigError(
            f"quire needs one block size for all layer groups; this model has {sizes}"
        )


def model_name(config: Any, extra: dict[str, Any], digests: FileDigests) -> str:
    """Return the digest of all that decides what KV means: weights by their contents, and how vLLM reads them."""
    model, cache = config.model_config, config.cache_config
    named = extra.get("weights")
    weights = named if named is not None else digests.of(weight_files(_folder(config)))
    hf_config = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        hf_config.pop(name, None)
    facts = {
        "weights": weights,
        "config": hf_config,
        "dtype": str(model.dtype),
        "kv_dtype": cache.cache_dtype,
        "quantization": model.quantization,
        "load_format": str(config.load_config.load_format),
        "vllm": version_of_vllm().rsplit(".", 1)[0],
    }
    return fingerprint(facts)


def version_of_vllm() -> str:
    """Return vLLM's version: another minor one may compute and lay out KV differently."""
    import vllm  # noqa: PLC0415 - whichever distribution it comes from

    return str(vllm.__version__).split("+")[0]


def _folder(config: Any) -> Path:
    """Return where the weights lie: a folder, a file, or the snapshot of a model of the hub."""
    model = config.model_config
    place = Path(model.model)
    if place.exists():
        return place
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - vLLM needs it itself

    try:
        return Path(
            snapshot_download(
                model.model,
                revision=model.revision,
                cache_dir=config.load_config.download_dir,
                local_files_only=True,
            )
        )
    except Exception:  # noqa: BLE001 - whatever it is, `weight_files` says what to do
        return place


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
