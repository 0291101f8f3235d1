"""One forward over the packed rows of many requests, through an unchanged transformers model."""

import inspect
import sys
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from threading import RLock
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from quire.engines.models.inventory import Inventory
from quire.engines.models.probe import probe_model
from quire.engines.packed.decoder import PlainDecoder
from quire.errors import UnsupportedModel
from quire.groups import ChunkedAttention, SlidingWindow
from quire.kernels.attention import AttentionPlan, Scoring, attend
from quire.tensors.kinds import KVShape, LayerKind, decoder_config, model_type
from quire.tensors.layout import KVLayout
from quire.tensors.model import ModelLayout
from quire.tensors.pool import KVPool

IMPLEMENTATION = "quire"
"""What the attention of a packed forward is called among those of transformers, and what makes its masks: none, for a
plan says what each row sees. Another thread that computes with the model meanwhile meets these too, and gets its own."""

_TRACED_TOKENS = 4

_attentions: Any = AttentionInterface()
_masks: Any = AttentionMaskInterface()


class _Attention(Protocol):
    """A function that computes the attention of all layers during one forward."""

    def __call__(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: dict[str, Any]
    ) -> torch.Tensor:
        """Take q `[N, heads, D]`, k and v `[N, kv_heads, D]`; return `[N, heads, Dv]`."""
        ...


_current: ContextVar[_Attention] = ContextVar("the attention of the forward that runs")


class PackedModel:
    """A decoder of transformers that computes the rows of many requests in one forward.

    layout  the layer groups, with the widths of K and V that the attention of each layer is given (of latent
            attention: those of all heads)
    plain   whether it is computed as a plain decoder (`decoder`), for as long as it has the parts of one

    The model's own forward is called, on `[1, N]` tokens of all requests, each with its position; its attention
    goes to block tables while that runs, and is the model's own again behind it. Raises `UnsupportedModel`, by
    name, for models that cannot be computed so, and `ConfigError` for one in training mode or on several devices.
    """

    def __init__(self, model: Any, block_size: int = 16, *, plain: bool = False) -> None:
        kinds, own = probe_model(model, block_size)
        self._takes = _accepted(model, kinds)
        self._configs = _configs(model)
        self.model = model
        self.plain = plain
        self._decoder = PlainDecoder(model)
        self.device: torch.device = model.device
        _attentions.register(IMPLEMENTATION, _attention)
        _masks.register(IMPLEMENTATION, _mask)
        traced = self._trace()
        self.layout, self._layers = _grouped(model, kinds, traced, own)

    def plans(self) -> list[AttentionPlan]:
        """Return a plan for each layer group, which says what its rows read once it was updated for a step."""
        plans: list[AttentionPlan] = []
        for group in self.layout.groups:
            kind = group.kind
            window = kind.window if isinstance(kind, SlidingWindow) else None
            chunk = kind.chunk if isinstance(kind, ChunkedAttention) else None
            plans.append(AttentionPlan(self.layout.block_size, window, chunk))
        return plans

    def wipe(self) -> None:
        """Overwrite data of earlier steps outside of pools."""
        self._decoder.wipe()

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None,
        plans: Sequence[AttentionPlan],
        pools: Sequence[KVPool],
        *,
        seen: Inventory | None = None,
    ) -> torch.Tensor:
        """Return the logits `[len(rows), vocab]` of some rows, None: of all, and write all K and V to the pools.

        ids, positions  int64 [N], the rows of the first request, then those of the next one
        plans, pools    one for each layer group
        seen            an inventory of the model that holds now; None: it is looked at here
        """

        def of_pools(
            module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: dict[str, Any]
        ) -> torch.Tensor:
            group, index = self._layers[module]
            held = pools[group].k[index], pools[group].v[index]
            scale = how.get("scaling") or q.shape[-1] ** -0.5
            scoring = Scoring(scale, how.get("s_aux"), how.get("softcap"))
            return attend(plans[group], held, q, (k, v), scoring)

        if self.plain and self._decoder.is_plain(seen):
            with locked(self.model), torch.inference_mode():
                found = self._decoder.logits(
                    (ids, positions), rows, plans, pools, self._layers, run=self._run
                )
            if found is not None:
                return found
        return self._run(ids, positions, rows, of_pools)

    def _run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None,
        attention: _Attention,
    ) -> torch.Tensor:
        given: dict[str, Any] = {}
        if rows is not None and "logits_to_keep" in self._takes:
            given["logits_to_keep"] = rows
        with self._switched(), torch.inference_mode():
            token = _current.set(attention)
            try:
                output = self.model(
                    input_ids=ids[None], position_ids=positions[None], use_cache=False, **given
                )
            finally:
                _current.reset(token)
        logits: torch.Tensor = output.logits[0]
        return logits if rows is None or given else logits[rows]

    def _trace(self) -> dict[Any, KVShape]:
        """Return the modules whose attention goes through the interface, in order, and what they are given."""
        found: dict[Any, KVShape] = {}
        name = model_type(self.model.config)

        def look(
            module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: dict[str, Any]
        ) -> torch.Tensor:
            if module in found:
                raise UnsupportedModel(
                    f"{name} computes layer {len(found)} with the attention of one before it"
                )
            if how.get("position_bias") is not None or how.get("is_causal") is False:
                raise UnsupportedModel(
                    f"{name}: the attention of layer {len(found)} has a bias by position, or is not "
                    "causal, which block tables cannot say"
                )
            found[module] = KVShape(k.shape[1], k.shape[2], v.shape[2])
            return q.new_zeros(*q.shape[:2], v.shape[2])

        ids = torch.arange(1, _TRACED_TOKENS + 1, device=self.model.device)
        try:
            self._run(ids, ids - 1, None, look)
        except UnsupportedModel:
            raise
        except Exception as error:  # a model may raise anything for an attention it does not know
            raise UnsupportedModel(f"{name} does not compute packed rows: {error}") from error
        return found

    @contextmanager
    def _switched(self) -> Generator[None]:
        """Have the model's attention go through `_attention`; one forward of a model at a time."""
        with locked(self.model):
            own = {id(config): config._attn_implementation for config in self._configs}  # noqa: SLF001 - its only name
            _own.update(own)
            for config in self._configs:
                config._attn_implementation_internal = IMPLEMENTATION  # noqa: SLF001 - sets this config alone
            try:
                yield
            finally:
                for config in self._configs:
                    config._attn_implementation_internal = own[id(config)]  # noqa: SLF001
                for name in own:
                    del _own[name]


_own: dict[int, str] = {}
"""The attention that each config named before, by its id, while it names quire's."""

_locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def locked(model: Any) -> AbstractContextManager[object]:
    """Return the lock under which engines of one model compute, each with its own attention or a plain one."""
    return _locks.setdefault(model, RLock())


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: Any, **how: Any
) -> tuple[torch.Tensor, Any]:
    """Compute one layer's attention as transformers asks for it: `[1, heads, N, D]` in, `[1, N, heads, Dv]` out."""
    attention = _current.get(None)
    if attention is None:
        eager = sys.modules[type(module).__module__].__dict__.get("eager_attention_forward")
        own = _attentions.get(_own_name(module.config), eager)
        return own(module, query, key, value, *mask, **how)
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    return attention(module, q, k, v, how)[None], None


def _mask(*, config: Any, **asked: Any) -> Any:
    """Return the mask of a forward that is not packed; of one that is, None."""
    if _current.get(None) is not None:
        return None
    return _masks[_own_name(config)](config=config, **asked)


def _own_name(config: Any) -> str:
    """Return what a config names but for packed forwards, which another thread may begin or end meanwhile."""
    while (name := config._attn_implementation) == IMPLEMENTATION:  # noqa: SLF001
        if (own := _own.get(id(config))) is not None:
            return own
    return name


def eos_ids(model: Any) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text of the model."""
    ids = model.generation_config.eos_token_id
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def _accepted(model: Any, kinds: Sequence[LayerKind]) -> frozenset[str]:
    """Return the names that the model's forward takes; raise `UnsupportedModel` where it cannot be packed."""
    name = model_type(model.config)
    if decoder_config(model.config) is not model.config:
        raise UnsupportedModel(
            f"{name} is a composite model; the engine runs text decoders: use its own"
        )
    recurrent = [str(index) for index, kind in enumerate(kinds) if kind.states]
    if recurrent:
        words = ", ".join(sorted({kind.word for kind in kinds if kind.states}))
        raise UnsupportedModel(
            f"{name}: layers {', '.join(recurrent)} are recurrent ({words}), and their state runs from one "
            "packed row into the next; PrefixCache(model) reuses such prefixes one request at a time"
        )
    takes = frozenset(inspect.signature(model.forward).parameters)
    if "position_ids" not in takes:
        raise UnsupportedModel(
            f"{name} takes no position_ids (ALiBi and other biases by position count rows instead), so "
            "that rows of several requests cannot be told apart; PrefixCache(model) runs it"
        )
    return takes


def _configs(model: Any) -> list[Any]:
    """Return the config objects that the model's modules read, each once."""
    found = {id(model.config): model.config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return list(found.values())


def _grouped(
    model: Any, kinds: Sequence[LayerKind], traced: dict[Any, KVShape], own: ModelLayout
) -> tuple[ModelLayout, dict[Any, tuple[int, int]]]:
    """Return the layout of what attention is given, and the group of each of its modules and the place in it."""
    name = model_type(model.config)
    cached = [index for index, kind in enumerate(kinds) if kind.tokens is not None]
    if len(traced) != len(cached):
        raise UnsupportedModel(
            f"{name}: the attention of {len(traced)} layers goes through transformers' "
            f"AttentionInterface, and {len(cached)} layers keep K and V; what goes elsewhere cannot be packed"
        )
    shapes: list[KVShape | None] = [None] * len(kinds)
    for index, shape in zip(cached, traced.values(), strict=True):
        shapes[index] = shape
    states = [()] * len(kinds)
    dtype = cast("KVLayout", own.groups[0].memory).dtype
    layout = ModelLayout.of_layers(kinds, shapes, states, dtype, own.block_size)
    places = {
        layer: (group, index)
        for group, each in enumerate(layout.groups)
        for index, layer in enumerate(each.layers)
    }
    layers = {module: places[layer] for module, layer in zip(traced, cached, strict=True)}
    return layout, layers
