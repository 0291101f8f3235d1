"""Quantization of a model: by what, whether it rounds activations, and where it mixes the tokens of a forward."""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch

from quire.engines.models.folded import Fold, fold_of, is_folded
from quire.errors import UnsupportedModel

_PACKAGES = frozenset(
    {
        "bitsandbytes",
        "torchao",
        "hqq",
        "aqlm",
        "awq",
        "auto_gptq",
        "gptqmodel",
        "compressed_tensors",
    }
)
_MOST_NAMED = 3


def check_quantized(model: Any) -> None:
    """Raise `UnsupportedModel` for weights that cannot be read, and for quantization that mixes the tokens of a forward.

    Such quantization takes a scale, or outliers, from all tokens of a forward at once, so that K and V of a token
    depend on those behind it. A short check on the model may not meet the tokens that show it.
    """
    for path, module in cast("Iterable[tuple[str, Any]]", model.named_modules()):
        kind = cast("type[object]", type(module))
        if (why := _mixes(module)) is not None:
            raise UnsupportedModel(
                f"{_name(kind)} at {path!r} {why}, so that K and V of a token depend on the tokens that "
                "follow: such quantization leaves no prefix to reuse"
            )
        for name, value in cast("dict[str, object]", vars(module)).items():
            if isinstance(value, torch.ScriptObject):
                raise UnsupportedModel(
                    f"{_name(kind)} at {path!r} packs quantized weights into a ScriptObject ({name}), which "
                    "nothing can be compared by: K and V could not be told from those of other weights; "
                    "quantize with torchao's Int8WeightOnlyConfig instead"
                )
    for path, fold in _folds(model):
        if fold.parts is None:
            raise UnsupportedModel(
                f"the weight {path!r} is a {_name(fold.kind)}, a tensor that does not tell what it is made of "
                "(no __tensor_flatten__): K and V could not be told from those of other weights. Dequantize it; a "
                "quantized weight of torchao or quanto does tell"
            )
        granularity = type(getattr(_dynamic(fold), "granularity", None)).__name__
        if granularity == "PerTensor" and "act_quant_scale" not in fold.parts:
            raise UnsupportedModel(
                f"the weight {path!r} is a {_name(fold.kind)} that quantizes activations with one scale for all tokens "
                "of a forward (PerTensor), so that K and V of a token depend on the tokens that follow; use PerRow, "
                "or quantize weights alone"
            )


def quantized_by(model: Any) -> str:
    """Return what quantizes a model, in words: classes of modules and weights; "" where nothing does."""
    kinds: list[type[object]] = [*map(type, model.modules())]
    kinds += [fold.kind for _, fold in _folds(model)]
    names = dict.fromkeys(_name(kind) for kind in kinds if _quantizes(kind))
    more = ["..."] if len(names) > _MOST_NAMED else []
    return ", ".join([*list(names)[:_MOST_NAMED], *more])


def rounds_activations(model: Any) -> bool:
    """Whether activations are quantized: rounding of float32 may then move one by a step of 1/127."""
    for module in cast("Iterable[object]", model.modules()):
        is_int8 = type(module).__name__ == "Linear8bitLt"
        if is_int8 or getattr(module, "activation_qtype", None) is not None:
            return True
    return any(_dynamic(fold) is not None for _, fold in _folds(model))


def why_mixed(model: Any) -> str:
    """Return what to add to a refusal of a model as not causal: that it is quantized, if it is."""
    names = quantized_by(model)
    return names and (
        f"; the model is quantized ({names}), and quantization that takes one scale from all tokens of a forward "
        "does this: quantize weights alone, or activations per token"
    )


def why_far(model: Any) -> str:
    """Return what to add to a refusal of a model as not exact: that it is quantized, if it is."""
    names = quantized_by(model)
    return names and f"; the model is quantized ({names})"


def _mixes(module: Any) -> str | None:
    """Return how a module mixes the tokens of a forward when it quantizes them; None: it does not."""
    kind = cast("type[object]", type(module))
    if kind.__module__.startswith(("torch.ao.nn.quantized.dynamic", "torch.nn.quantized.dynamic")):
        return "quantizes activations with one scale for all tokens of a forward (quantize_dynamic)"
    threshold = getattr(getattr(module, "state", None), "threshold", 0.0)
    if kind.__name__ == "Linear8bitLt" and threshold:
        return (
            f"takes out of quantization the columns in which any token of a forward exceeds {threshold:g} (LLM.int8(); "
            "load it with llm_int8_threshold=0.0, or in 4 bits)"
        )
    return None


def _dynamic(fold: Fold) -> Any:
    """Return how a weight has activations quantized, as torchao says it; None: not at all."""
    return fold.about.get("act_quant_kwargs")


def _folds(model: Any) -> Iterator[tuple[str, Fold]]:
    held = [*model.named_parameters(), *model.named_buffers()]
    while held:
        path, tensor = held.pop()
        if is_folded(tensor):
            fold = fold_of(tensor)
            yield path, fold
            parts = (fold.parts or {}).items()
            held += [(f"{path}.{name}", part) for name, part in parts if name]


def _quantizes(kind: type[object]) -> bool:
    where = f"{kind.__module__}.{kind.__qualname__}"
    return where.partition(".")[0] in _PACKAGES or "quant" in where.lower()


def _name(kind: type[object]) -> str:
    return f"{kind.__module__.partition('.')[0]} {kind.__qualname__}"
