"""The forward of a plain decoder in few passes, which fuse the operations between its products.

Such a decoder is of transformers, each layer with two RMSNorms before grouped attention over rotated heads and a gated
MLP (Llama, Mistral, Qwen 2). Its modules' weights are read as they are at each call. On a GPU decode steps are graphs.
"""

# ruff: noqa: SLF001 - the registers of a module have no other names
# pyright: reportPrivateUsage=false

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, cast
from weakref import ref

import torch

from quire.engines.models.folded import is_folded
from quire.engines.models.inventory import Inventory, only_looks
from quire.kernels.attention import AttentionPlan
from quire.kernels.attention.step import runs_on_device
from quire.tensors.pool import KVPool

_log = logging.getLogger(__name__)
_MODULES = cast("Any", torch.nn.modules.module)
_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
_COMPILERS = {"cpu": "llvmlite", "cuda": "triton"}
_MOST_GRAPH_ROWS = 512
"""Rows of a step above which launching is a small part of it."""

_MODEL = {"model": None, "lm_head": "Linear"}
_BASE = {
    "embed_tokens": "Embedding",
    "layers": None,
    "norm": "RMSNorm",
    "rotary_emb": "RotaryEmbedding",
}
_LAYER = {
    "self_attn": None,
    "mlp": None,
    "input_layernorm": "RMSNorm",
    "post_attention_layernorm": "RMSNorm",
}
_ATTENTION = {"q_proj": "Linear", "k_proj": "Linear", "v_proj": "Linear", "o_proj": "Linear"}
_MLP = {"gate_proj": "Linear", "up_proj": "Linear", "down_proj": "Linear", "act_fn": "SiLU"}


def is_plain(model: Any) -> bool:
    """Whether a model has the parts of a plain decoder, and this machine can compute them.

    The parts are those of transformers and torch. That the model puts them together in this way is shown by its logits.
    """
    dtype, device = model.dtype, model.device.type
    return (
        dtype in _DTYPES.get(device, ())
        and find_spec(_COMPILERS[device]) is not None
        and _computes_here(device)
        and _has(model, _MODEL, dtype)
        and _has(model.model, _BASE, dtype)
        and all(
            _has(layer, _LAYER, dtype)
            and _has(layer.self_attn, _ATTENTION, dtype)
            and _has(layer.mlp, _MLP, dtype)
            for layer in model.model.layers
        )
    )


class PlainDecoder:
    """Computes a plain model, with compiled parts that live as long as model and pools are the same.

    On a CPU these are passes, which do not keep pools alive: memory that a pool has given up is free before the next
    step. On a GPU they are CUDA graphs of decode steps.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: tuple[Any, Any] = (), None
        self._turns: list[torch.Tensor] = []
        self._captures = True
        self._own: Inventory | None = None
        self._seen: Inventory | None = None

    def is_plain(self, seen: Inventory | None) -> bool:
        """Whether the model still is plain, as `is_plain` says.

        `seen`: an inventory of the model that holds now, as far as is known.
        """
        if self._own is None or (
            (seen is None or seen is not self._seen) and not self._own.holds(sampled=False)
        ):
            self._kept, self._turns = ((), None), []
            self._own = Inventory(self._model).forget_tensors() if is_plain(self._model) else None
        self._seen = seen
        return self._own is not None

    def wipe(self) -> None:
        """Overwrite data of earlier steps between layers; graphs are captured anew."""
        _, kept = self._kept
        if hasattr(kept, "wipe"):
            kept.wipe()
        else:
            self._kept = (), None

    def logits(
        self,
        tokens: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor | None,
        plans: Sequence[AttentionPlan],
        pools: Sequence[KVPool],
        places: Mapping[Any, tuple[int, int]],
        *,
        run: Callable[..., torch.Tensor],
    ) -> torch.Tensor | None:
        """Return the logits `[len(rows), vocab]` of some rows, None: of all; or None for a step that only `run` computes.

        tokens  their ids and their positions, int64 [N]
        plans, pools, places  one for each layer group; the group of each attention, and its place there
        run     the model's own forward: of ids, positions, the rows of the logits, and what attends
        """
        (ids, positions), base = tokens, self._model.model
        if ids.is_cuda:
            is_asked = rows is None or len(rows) == len(ids)
            return self._replayed(tokens, plans, pools, places, run) if is_asked else None
        hidden: torch.Tensor = base.embed_tokens(ids)
        cos, sin = self._rotary(hidden, positions)
        inputs = hidden, cos, sin
        last, _ = places[base.layers[-1].self_attn]
        return self._passes(inputs, pools, places).logits(inputs, plans, last, rows)

    def _rotary(self, hidden: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """Return the cosines and the sines `[N, D]` of positions; those of all so far are kept."""
        last = int(positions.max())
        if not self._turns or last >= len(self._turns[0]):
            until, rotary = torch.arange(1 << last.bit_length()), self._model.model.rotary_emb
            self._turns = [each[0] for each in rotary(hidden[None], until[None])]
        return [each.index_select(0, positions) for each in self._turns]

    def _replayed(
        self,
        tokens: tuple[torch.Tensor, torch.Tensor],
        plans: Sequence[AttentionPlan],
        pools: Sequence[KVPool],
        places: Mapping[Any, tuple[int, int]],
        run: Callable[..., torch.Tensor],
    ) -> torch.Tensor | None:
        """Return the logits of a step that decodes, one row of each request, by a graph; None for any other."""
        num_rows, packed = len(tokens[0]), plans[0].packed
        decodes = num_rows == len(packed.lengths) and packed.positions is None
        if not self._captures or not decodes or num_rows > _MOST_GRAPH_ROWS:
            return None
        held = [each for pool in pools for each in (pool.k, pool.v)]
        key, graphs = self._kept
        try:
            if graphs is None or not all(was() is now for was, now in zip(key, held, strict=True)):
                self._kept = (), None
                layers = [each.self_attn for each in self._model.model.layers]
                heads = {each: each.q_proj.out_features // each.head_dim for each in layers}
                of_heads = {(places[each][0], count) for each, count in heads.items()}
                self._captures = all(
                    runs_on_device((pools[group].k[0], pools[group].v[0]), count)
                    for group, count in of_heads
                )
                if not self._captures:
                    return None
                from quire.engines.packed.graphs import Graphs  # noqa: PLC0415 - loads Triton

                graphs = Graphs(heads, places, pools)
                self._kept = [ref(each) for each in held], graphs
            return graphs.logits(tokens, plans, run)
        except torch.OutOfMemoryError:
            self._kept = (), None  # there may be more another time
        except Exception as error:  # noqa: BLE001 - what the model itself raises, it raises again
            _log.warning("decode steps are not captured as CUDA graphs, and take longer: %s", error)
            self._captures, self._kept = False, ((), None)
        return None

    def _passes(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        pools: Sequence[KVPool],
        places: Mapping[Any, tuple[int, int]],
    ) -> Any:
        """Return passes over the pools with room for the rows of a step: those of steps before, if these fit."""
        from quire.engines.packed.decoder_passes import Passes  # noqa: PLC0415 - loads the compiler

        held = [each for pool in pools for each in (pool.k, pool.v)]
        key, passes = self._kept
        threads, num_rows = torch.get_num_threads(), len(inputs[0])
        if (
            passes is None
            or passes.threads != threads
            or passes.most_rows < num_rows
            or not all(was() is now for was, now in zip(key, held, strict=True))
        ):
            rooms = [
                (group, (pools[group].k[index], pools[group].v[index]))
                for group, index in (places[each.self_attn] for each in self._model.model.layers)
            ]
            passes = Passes(self._model, inputs, rooms, 1 << (num_rows - 1).bit_length())
            self._kept = [ref(each) for each in held], passes
        return passes


def _computes_here(device: str) -> bool:
    """Whether nothing outside of a model's modules has a part in what they compute."""
    return (
        not torch.is_autocast_enabled(device)
        and not _MODULES._global_forward_hooks
        and not _MODULES._global_forward_pre_hooks
    )


def _has(module: Any, kinds: Mapping[str, str | None], dtype: torch.dtype) -> bool:
    """Whether a module computes as it was made to, and its parts are these; those of a kind do as well, in a type."""
    parts: dict[str, Any] = module._modules
    return (
        _is_unchanged(module)
        and parts.keys() == kinds.keys()
        and all(
            kind is None
            or (
                _is_unchanged(parts[name])
                and type(parts[name]).__name__.removesuffix("Activation").endswith(kind)
                and all(
                    each is None
                    or (not is_folded(each) and each.dtype == dtype and each.is_contiguous())
                    for each in parts[name]._parameters.values()
                )
            )
            for name, kind in kinds.items()
        )
    )


def _is_unchanged(module: Any) -> bool:
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    made_by = type(module).__module__.partition(".")[0]
    return (
        made_by in ("torch", "transformers")
        and "forward" not in vars(module)
        and all(map(only_looks, hooks))
    )
