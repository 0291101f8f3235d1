"""The forward of a plain decoder in few passes: what its modules compute, with what lies between their products as one.

Such a decoder is of transformers, each layer with two RMSNorms before grouped attention over rotated heads and a gated
MLP (Llama, Mistral, Qwen 2). Its modules' weights are read as they are at each call.
"""

# ruff: noqa: SLF001 - the registers of a module have no other names
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from operator import is_
from typing import Any, cast

import torch

from quire.engines.hf.sight import Sight, only_looks
from quire.engines.packed.attention import AttentionPlan
from quire.engines.packed.attention.reference import KV

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
    """Computes a model that is plain. The passes of a step are those of the one before where that had the same rows."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: tuple[Any, Any] = None, None
        self._own: Sight | None = None
        self._seen: Sight | None = None

    def is_plain(self, seen: Sight | None) -> bool:
        """Whether the model still is, as `is_plain` says; `seen`: a sight of it that holds now, as far as is known."""
        if self._own is None or (
            (seen is None or seen is not self._seen) and not self._own.holds(sampled=False)
        ):
            self._kept = None, None
            self._own = Sight(self._model).forget_tensors() if is_plain(self._model) else None
        self._seen = seen
        return self._own is not None

    def logits(
        self,
        tokens: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor | None,
        held: Callable[[Any], tuple[AttentionPlan, KV]],
    ) -> torch.Tensor:
        """Return the logits `[len(rows), vocab]` of some rows, None: of all.

        tokens  their ids and their positions, int64 [N]
        held    what the attention of a module reads: the plan of the step, and K and V of its layer
        """
        from quire.engines.packed.passes import Passes  # noqa: PLC0415 - loads the compiler

        (ids, positions), base = tokens, self._model.model
        hidden: torch.Tensor = base.embed_tokens(ids)
        cos, sin = (each[0].contiguous() for each in base.rotary_emb(hidden[None], positions[None]))
        rooms = [held(layer.self_attn) for layer in base.layers]
        if rows is None or len(rows) == len(ids):
            passes = self._passes(Passes, (hidden, cos, sin), rooms)
        else:
            passes = Passes(hidden, cos, sin)
            for layer, (plan, pools) in zip(base.layers[:-1], rooms[:-1], strict=True):
                passes.layer(layer, plan, pools)
            # Nothing is asked of other rows behind their last K and V.
            layer, (plan, pools) = base.layers[-1], rooms[-1]
            passes = passes.of(rows, layer, plan, pools)
            if len(rows):
                passes.layer(layer, plan.of(rows.numpy()), pools)
        return passes.logits(base.norm, self._model.lm_head)

    def _passes(
        self, make: Any, inputs: tuple[torch.Tensor, ...], rooms: list[tuple[AttentionPlan, KV]]
    ) -> Any:
        """Return the passes of all layers for a step of these rows: those of the last one, if they are the same."""
        layers = self._model.model.layers
        works = [plan.parts for plan, _ in rooms]
        places = [each.data_ptr() for _, both in rooms for each in both]
        shape = inputs[0].shape, inputs[0].dtype, torch.get_num_threads()
        key, passes = self._kept
        if key is not None and key[:2] == (places, shape) and all(map(is_, key[2], works)):
            passes.take(*inputs)
        else:
            passes = make(*inputs)
            for layer, (plan, both) in zip(layers, rooms, strict=True):
                passes.layer(layer, plan, both)
            self._kept = (places, shape, works), passes
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
