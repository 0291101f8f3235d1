"""Models whose weights are quantized: by the packages that people use, and by a tensor subclass of our own."""

import warnings
from importlib.util import find_spec

import pytest
import torch
import transformers
from hf_help import GQA, loud, settled, sow
from torch.utils._pytree import tree_map_only

WIDE = {**GQA, "hidden_size": 64, "intermediate_size": 96}


class Silent(torch.Tensor):
    """A weight as integers and a scale per row, dequantized to compute, which does not tell what it is made of."""

    @staticmethod
    def __new__(cls, values, scale, note="rows"):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)

    def __init__(self, values, scale, note="rows"):
        self.values, self.scale, self.note = values, scale, note

    @classmethod
    def of(cls, weight, note="rows"):
        scale = weight.detach().abs().amax(-1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale, note)

    def __repr__(self):
        return f"{type(self).__name__}({list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func is aten.detach.default:
            return cls(args[0].values, args[0].scale, args[0].note)
        if func in (aten._to_copy.default, aten.clone.default):
            return cls(args[0].values.clone(), args[0].scale.clone(), args[0].note)
        if func in (aten.as_strided.default, aten.view.dtype):
            raise NotImplementedError(func)
        plain = tree_map_only(Silent, lambda each: each.values * each.scale, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Int8(Silent):
    """The same, which does tell it."""

    def __tensor_flatten__(self):
        return ["values", "scale"], {"note": self.note}

    @classmethod
    def __tensor_unflatten__(cls, parts, about, size, stride):
        return cls(parts["values"], parts["scale"], about["note"])


def float_model(seed=0, **changes):
    """A random Llama wide enough for every package, always the same one for a seed."""
    sow(seed)
    config = transformers.LlamaConfig(**{**WIDE, **changes})
    return settled(loud(transformers.AutoModelForCausalLM.from_config(config).eval()))


def linears(model):
    return [each for each in model.modules() if isinstance(each, torch.nn.Linear)]


def own_subclass(model, kind=Int8):
    for linear in linears(model):
        linear.weight = torch.nn.Parameter(kind.of(linear.weight), requires_grad=False)


def torchao(name, **settings):
    def quantize(model):
        from torchao import quantization

        quantization.quantize_(model, getattr(quantization, name)(**settings))

    return quantize


def quanto(**settings):
    def quantize(model):
        from optimum import quanto

        types = {name: getattr(quanto, kind) for name, kind in settings.items()}
        quanto.quantize(model, **types)
        if "activations" in types:
            with torch.no_grad(), quanto.Calibration():
                model(torch.arange(3, 40)[None])
        quanto.freeze(model)

    return quantize


KINDS = {
    "own subclass": own_subclass,
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao int8 and activations": torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao intx": torchao("IntxWeightOnlyConfig"),
    "quanto int8": quanto(weights="qint8"),
    "quanto int8 and activations": quanto(weights="qint8", activations="qint8"),
}


def quantize(model, kind):
    """Quantize a model in place; skip the test where the package is missing."""
    package = {"torchao": "torchao", "quanto": "optimum"}.get(kind.split()[0])
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        KINDS[kind](model)
    return model.eval()


def quantized_model(kind, seed=0, **changes):
    """A random model, quantized."""
    return quantize(float_model(seed, **changes), kind)
