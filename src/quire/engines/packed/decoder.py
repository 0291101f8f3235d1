"""The forward of a plain decoder in few passes: what its modules compute, with what lies between their products as one.

Such a decoder is of transformers, each layer with two RMSNorms before grouped attention over rotated heads and a gated
MLP (Llama, Mistral, Qwen 2). Its modules' weights are read as they are at each call.
"""

# ruff: noqa: SLF001 - the registers of a module have no other names
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, TypeAlias, cast

import torch

from quire.engines.hf.sight import only_looks

Attend: TypeAlias = Callable[
    [Any, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor
]
"""Takes the module, q `[N, heads, D]`, K and V `[N, kv_heads, D]`, and as transformers' attention does `scaling`; but
`rotary` too, cosines and sines `[N, D]` by which q and K are to be turned; and `rows`, those that have queries, or
none: all. Returns `[rows, heads, D]`."""

_MODULES = cast("Any", torch.nn.modules.module)
_DTYPES = (torch.float32, torch.bfloat16)
_ONEDNN = (
    cast("Any", torch.ops.mkldnn)._linear_pointwise.default
    if torch.backends.mkldnn.is_available()
    else None
)
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
        and not torch.is_autocast_enabled("cpu")
        and not _MODULES._global_forward_hooks
        and not _MODULES._global_forward_pre_hooks
        and _has(model, _MODEL, dtype)
        and _has(model.model, _BASE, dtype)
        and all(
            _has(layer, _LAYER, dtype)
            and _has(layer.self_attn, _ATTENTION, dtype)
            and _has(layer.mlp, _MLP, dtype)
            for layer in model.model.layers
        )
    )


def compute(
    model: Any,
    tokens: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor | None,
    attend: Attend,
) -> torch.Tensor:
    """Return the logits `[len(rows), vocab]` of some rows, None: of all, of a model that is plain.

    tokens  their ids and their positions, int64 [N]
    """
    from quire.engines.packed.pointwise import add_norm, gated  # noqa: PLC0415 - loads the compiler

    (ids, positions), base = tokens, model.model
    hidden: torch.Tensor = base.embed_tokens(ids)
    added: torch.Tensor | None = None
    rotary = tuple(each[0].contiguous() for each in base.rotary_emb(hidden[None], positions[None]))

    def normed(norm: Any) -> torch.Tensor:
        return add_norm(hidden, added, norm.weight, norm.variance_epsilon)

    for layer in base.layers:
        attention, mlp = layer.self_attn, layer.mlp
        states, how = (
            normed(layer.input_layernorm),
            {"scaling": attention.scaling, "rotary": rotary},
        )
        keys, values = (
            _heads(states, each, attention.head_dim)
            for each in (attention.k_proj, attention.v_proj)
        )
        if layer is base.layers[-1] and rows is not None and len(rows) < len(ids):
            # Nothing is asked of other rows behind their last K and V.
            states, hidden, how["rows"] = states[rows], hidden[rows], rows
        queries = _heads(states, attention.q_proj, attention.head_dim)
        found = attend(attention, queries, keys, values, how)
        added = _linear(found.flatten(1), attention.o_proj)
        states = normed(layer.post_attention_layernorm)
        gate, up = _linear(states, mlp.gate_proj), _linear(states, mlp.up_proj)
        added = _linear(gated(gate, up), mlp.down_proj)
    return _linear(normed(base.norm), model.lm_head)


def _heads(states: torch.Tensor, module: Any, width: int) -> torch.Tensor:
    return _linear(states, module).view(len(states), module.out_features // width, width)


def _linear(states: torch.Tensor, module: Any) -> torch.Tensor:
    """Return what a linear layer computes, by oneDNN where torch has it: in float32 that is faster than its own."""
    if _ONEDNN is None:
        return torch.nn.functional.linear(states, module.weight, module.bias)
    return _ONEDNN(states, module.weight, module.bias, "none", [], "")


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
                    each is None or each.dtype == dtype for each in parts[name]._parameters.values()
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
