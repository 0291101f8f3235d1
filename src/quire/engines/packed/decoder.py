"""The forward of a plain decoder in few passes: what its modules compute, with what lies between their products as one.

Such a decoder is of transformers, each layer with two RMSNorms before grouped attention over rotated heads and a gated
MLP (Llama, Mistral, Qwen 2). Its modules' weights are read as they are at each call.
"""

# ruff: noqa: SLF001 - the registers of a module have no other names
# pyright: reportPrivateUsage=false

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, cast
from weakref import ref

import torch

from quire.engines.hf.sight import Sight, only_looks
from quire.engines.packed.attention import AttentionPlan
from quire.tensors.pool import KVPool

_MODULES = cast("Any", torch.nn.modules.module)
_DTYPES = (torch.float32, torch.bfloat16)
_COMPILES = find_spec("llvmlite") is not None

_MODEL = {"model": None, "lm_head": "Linear"}
_BASE = {"embed_tokens": "Embedding", "layers": None, "norm": "RMSNorm", "rotary_emb": None}
_LAYER = {
    "self_attn": None,
    "mlp": None,
    "input_layernorm": "RMSNorm",
    "post_attention_layernorm": "RMSNorm",
}
_ATTENTION = {"q_proj": "Linear", "k_proj": "Linear", "v_proj": "Linear", "o_proj": "Linear"}
_MLP = {"gate_proj": "Linear", "up_proj": "Linear", "down_proj": "Linear", "act_fn": "SiLU"}


def is_plain(model: Any) -> bool:
    """Whether a model has the parts of a plain decoder, as transformers and torch make them, on a CPU.

    That these are put together as here remains to be shown, by its logits.
    """
    dtype = model.dtype
    return (
        _COMPILES
        and model.device.type == "cpu"
        and dtype in _DTYPES
        and _computes_here()
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
    """Computes a model that is plain, by passes that stay for as long as model and pools are the same.

    Pools are not kept alive: memory that a pool has given up is free before the next step.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: tuple[Any, Any] = (), None
        self._own: Sight | None = None
        self._seen: Sight | None = None

    def is_plain(self, seen: Sight | None) -> bool:
        """Whether the model still is, as `is_plain` says; `seen`: a sight of it that holds now, as far as is known."""
        if self._own is None or (
            (seen is None or seen is not self._seen) and not self._own.holds(sampled=False)
        ):
            self._kept = (), None
            self._own = Sight(self._model).forget_tensors() if is_plain(self._model) else None
        self._seen = seen
        return self._own is not None

    def logits(
        self,
        tokens: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor | None,
        plans: Sequence[AttentionPlan],
        pools: Sequence[KVPool],
        places: Mapping[Any, tuple[int, int]],
    ) -> torch.Tensor:
        """Return the logits `[len(rows), vocab]` of some rows, None: of all.

        tokens  their ids and their positions, int64 [N]
        plans, pools, places  one for each layer group; the group of each attention, and its place there
        """
        (ids, positions), base = tokens, self._model.model
        hidden: torch.Tensor = base.embed_tokens(ids)
        cos, sin = (each[0] for each in base.rotary_emb(hidden[None], positions[None]))
        inputs = hidden, cos, sin
        last, _ = places[base.layers[-1].self_attn]
        return self._passes(inputs, pools, places).logits(inputs, plans, last, rows)

    def _passes(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        pools: Sequence[KVPool],
        places: Mapping[Any, tuple[int, int]],
    ) -> Any:
        """Return passes over the pools with room for the rows of a step: those of steps before, if these fit."""
        from quire.engines.packed.passes import Passes  # noqa: PLC0415 - loads the compiler

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


def _computes_here() -> bool:
    """Whether nothing outside of a model's modules has a part in what they compute."""
    return (
        not torch.is_autocast_enabled("cpu")
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
                    each is None or (each.dtype == dtype and each.is_contiguous())
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
