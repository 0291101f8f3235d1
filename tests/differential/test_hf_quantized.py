"""Quantized models: their tokens are those without a cache, and their weights are told apart by what these consist of."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_help import make_cache, random_ids
from quantized_help import (
    KINDS,
    Int8,
    Silent,
    float_model,
    linears,
    own_subclass,
    quantize,
    quantized_model,
    torchao,
)

from quire import ops
from quire.engines.hf import PrefixCache, SlotPrefixCache
from quire.engines.loop import Engine, SamplingParams
from quire.errors import UnsupportedModel
from turns import few

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
IDS = random_ids(torch.Generator().manual_seed(3), 41)
PACKED = sorted(KINDS)
FEW = few(PACKED, "own subclass", "torchao int8", "quanto int8")


def reused(model, cache):
    """Generate as the plain model does; return the tokens that were reused."""
    expected = model.generate(IDS, max_new_tokens=4)
    assert torch.equal(cache.generate(IDS, max_new_tokens=4), expected)
    ops.check(cache.manager)
    return cache.last.cached_tokens


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", PACKED)
def test_a_quantized_model_generates_as_without_a_cache(kind):
    model = quantized_model(kind)
    cache = PrefixCache(model, "4MiB", 4)
    assert [reused(model, cache) for _ in range(2)] == [0, 40]
    with cache.session(IDS) as past, torch.no_grad():
        assert past.get_seq_length() == 40
        model(IDS[:, 40:], past_key_values=past, use_cache=True)
    assert cache.last.stored_tokens >= 0
    assert reused(model, cache) == 40


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", PACKED)
def test_an_engine_of_a_quantized_model_generates_as_the_model_does(kind):
    model = quantized_model(kind)
    engine = Engine(model, num_blocks=200, block_size=4)
    expected = model.generate(IDS, max_new_tokens=4)[0, 41:].tolist()
    for found in (0, 40):
        (output,) = engine.generate([IDS[0].tolist()], SamplingParams(max_tokens=4, temperature=0))
        assert list(output.outputs[0].token_ids) == expected
        assert output.num_cached_tokens == found


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", PACKED)
def test_weights_that_are_quantized_in_place_are_others(kind):
    model = float_model()
    cache = make_cache(model, block_size=4)
    assert [reused(model, cache) for _ in range(2)] == [0, 40]
    quantize(model, kind)
    assert [reused(model, cache) for _ in range(2)] == [0, 40]


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", FEW)
def test_a_session_in_which_the_model_is_quantized_keeps_nothing(kind):
    model = float_model()
    cache = make_cache(model, block_size=4)
    with cache.session(IDS) as past, torch.no_grad():
        model(IDS[:, :30], past_key_values=past, use_cache=True)
        quantize(model, kind)
    assert cache.last.stored_tokens == 0
    assert reused(model, cache) == 0


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", FEW)
def test_the_name_of_a_quantized_model_is_that_of_its_weights(kind):
    names = [
        make_cache(model, block_size=4).fingerprint
        for model in (quantized_model(kind), quantized_model(kind), float_model())
    ]
    assert names[0] == names[1] != names[2]
    assert make_cache(quantized_model(kind, seed=1), block_size=4).fingerprint not in names


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", FEW)
def test_a_tier_keeps_quantized_models_apart(kind, tmp_path):
    pytest.importorskip("xxhash")
    from quire.tiers import Files

    for seed, found in ((0, 0), (1, 0), (0, 40), (1, 40)):
        model = quantized_model(kind, seed)
        with make_cache(model, block_size=4, tiers=[Files(tmp_path)]) as cache:
            assert reused(model, cache) == found
    model = float_model()
    with make_cache(model, block_size=4, tiers=[Files(tmp_path)]) as cache:
        assert reused(model, cache) == 0


_NAMES = """
from quantized_help import KINDS, float_model, quantize
from hf_help import make_cache
for kind in sorted(KINDS):
    try:
        model = quantize(float_model(), kind)
    except BaseException:
        continue
    print(kind, make_cache(model, block_size=4).kept.identity.whole(), sep="=")
"""


@pytest.mark.ci
@pytest.mark.slow
def test_another_process_gives_quantized_weights_the_same_name():
    pytest.importorskip("xxhash")
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), *sys.path])
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _NAMES],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = dict(line.split("=") for line in run.stdout.split("\n") if "=" in line)
    assert "own subclass" in names
    for kind, name in names.items():
        cache = make_cache(quantized_model(kind), block_size=4)
        assert cache.kept.identity.whole() == name


# -- where such a tensor may be -------------------------------------------------------------------


class Holding(torch.nn.Module):
    """A projection that keeps its weight as something else than a parameter."""

    def __init__(self, weight, how):
        super().__init__()
        self.how = how
        if how == "buffer":
            self.register_buffer("weight", weight)
        elif how == "list":
            self.kept = [weight]
        else:
            self.kept = weight

    def held(self):
        return (
            self.weight
            if self.how == "buffer"
            else self.kept[0]
            if self.how == "list"
            else self.kept
        )

    def forward(self, states):
        return torch.nn.functional.linear(states, self.held())


@pytest.mark.cases(1)
@pytest.mark.parametrize("how", ["buffer", "attribute", "list"])
def test_quantized_weights_that_are_no_parameters_count(how):
    def made(seed):
        model = float_model(seed)
        for layer in model.model.layers:
            layer.self_attn.k_proj = Holding(Int8.of(layer.self_attn.k_proj.weight), how)
        return model

    model = made(0)
    cache = make_cache(model, block_size=4)
    assert make_cache(made(0), block_size=4).fingerprint == cache.fingerprint
    assert [reused(model, cache) for _ in range(2)] == [0, 40]
    model.model.layers[0].self_attn.k_proj.held().values.neg_()
    assert [reused(model, cache) for _ in range(2)] == [0, 40]


def with_other_values(weight):
    weight.values.neg_()


def with_another_scale(weight):
    weight.scale.mul_(1.5)


def with_scale_through_data(weight):
    weight.scale.data.mul_(1.5)


def with_new_values(weight):
    weight.values = weight.values.flip(0)


def with_another_note(weight):
    weight.note = "columns"


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "change",
    [
        with_other_values,
        with_another_scale,
        with_scale_through_data,
        with_new_values,
        with_another_note,
    ],
)
def test_a_change_within_a_quantized_weight_is_noticed(change):
    model = float_model()
    own_subclass(model)
    cache = make_cache(model, block_size=4)
    assert [reused(model, cache) for _ in range(2)] == [0, 40]
    change(model.model.layers[1].self_attn.v_proj.weight)
    assert [reused(model, cache) for _ in range(2)] == [0, 40]


def test_scales_tell_weights_apart_whose_integers_are_equal():
    names = set()
    for factor in (1.0, 1.5):
        model = float_model()
        own_subclass(model)
        model.model.layers[0].self_attn.k_proj.weight.scale.mul_(factor)
        names.add(make_cache(model, block_size=4).fingerprint)
    assert len(names) == 2


class Scales:
    """The data that a package keeps beside a weight, in an object of its own class."""

    def __init__(self, scale):
        self.scale = scale


class WeightWithState(torch.nn.Parameter):
    """A weight in its own memory, with scales as an attribute of it."""

    def __new__(cls, data, factor):
        return torch.Tensor._make_subclass(cls, data)

    def __init__(self, data, factor):
        self.state = Scales(torch.full((1,), factor))


def test_attributes_of_a_quantized_weight_are_part_of_the_identity():
    def made(factor):
        model = float_model()
        projection = model.model.layers[0].self_attn.k_proj
        projection.weight = WeightWithState(projection.weight.detach(), factor)
        projection.register_forward_hook(lambda module, _, out: out * module.weight.state.scale)
        return model

    model = made(1.0)
    cache = make_cache(model, block_size=4)
    assert cache.fingerprint != make_cache(made(2.0), block_size=4).fingerprint
    assert [reused(model, cache) for _ in range(2)] == [0, 40]
    model.model.layers[0].self_attn.k_proj.weight.state.scale = torch.full((1,), 3.0)
    assert [reused(model, cache) for _ in range(2)] == [0, 40]


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", FEW)
def test_tied_weights_are_quantized_with_what_they_are_tied_to(kind):
    model = quantized_model(kind, tie_word_embeddings=True)
    cache = make_cache(model, block_size=4)
    assert [reused(model, cache) for _ in range(2)] == [0, 40]


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", FEW)
def test_a_quantized_model_that_was_moved_or_copied_is_the_same(kind):
    model = quantized_model(kind)
    cache = make_cache(model, block_size=4)
    assert [reused(model, cache) for _ in range(2)] == [0, 40]
    model.to("cpu")
    assert reused(model, cache) == 40


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", FEW)
def test_an_adapter_over_quantized_weights_keeps_to_itself(kind):
    peft = pytest.importorskip("peft")
    model = quantized_model(kind)
    cache = make_cache(model, block_size=4)
    assert reused(model, cache) == 0
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["k_proj"], init_lora_weights=False)
    try:
        wrapped = peft.get_peft_model(model, config).eval()
        with torch.no_grad():
            model(IDS)
    except Exception as error:  # noqa: BLE001 - PEFT says so in many ways
        pytest.skip(f"PEFT does not adapt {kind}: {error!r:.80}")
    assert [reused(model, cache) for _ in range(2)] == [0, 40]
    with wrapped.disable_adapter():
        assert reused(model, cache) == 40


def test_slots_of_a_quantized_model_are_its_own():
    model = float_model()
    own_subclass(model)
    cache = SlotPrefixCache(model, 2, 128)
    expected = model.generate(IDS, max_new_tokens=4)
    for _ in range(2):
        assert torch.equal(cache.generate(IDS, max_new_tokens=4), expected)
    assert cache.stats.hit_rate > 0


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_sparse_weights_are_part_of_the_identity(layout):
    def made(seed):
        model = float_model(seed)
        projection = model.model.layers[0].self_attn.k_proj
        weight = projection.weight.detach().clone()
        weight[weight.abs() < weight.abs().median()] = 0
        projection.weight = torch.nn.Parameter(getattr(weight, layout)(), requires_grad=False)
        projection.forward = lambda states: states @ projection.weight.to_dense().t()
        return model

    model = made(0)
    cache = make_cache(model, block_size=4)
    assert [reused(model, cache) for _ in range(2)] == [0, 40]
    weight = model.model.layers[0].self_attn.k_proj.weight.detach()
    (weight._values() if layout == "to_sparse" else weight.values()).mul_(2)
    assert [reused(model, cache) for _ in range(2)] == [0, 40]


# -- quantization that leaves nothing to reuse -----------------------------------------------------


def silent(model):
    own_subclass(model, Silent)


def dynamic(model):
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def per_tensor(model):
    quantization = pytest.importorskip("torchao.quantization")
    torchao("Int8DynamicActivationInt8WeightConfig", granularity=quantization.PerTensor())(model)


class Linear8bitLt(torch.nn.Linear):
    """A layer with the name and the threshold of bitsandbytes'."""


def outliers(model):
    for linear in linears(model):
        linear.__class__ = Linear8bitLt
        linear.state = type("State", (), {"threshold": 6.0})()


REFUSED = [
    (silent, r"'[\w.]+weight' is a quantized_help Silent, .* quantized weight"),
    (dynamic, r"one scale for all tokens of a forward .*quantiz"),
    (per_tensor, r"quantizes activations with one scale for all tokens"),
    (outliers, r"exceeds 6 .*quantization"),
]


@pytest.mark.parametrize(
    ("change", "message"), REFUSED, ids=lambda each: getattr(each, "__name__", "")
)
@pytest.mark.parametrize("of", [PrefixCache, SlotPrefixCache, Engine])
def test_quantization_that_leaves_nothing_to_reuse_is_refused_by_name(change, message, of):
    model = float_model()
    model = change(model) or model
    sizes = {PrefixCache: ("1MiB",), SlotPrefixCache: (2, 64), Engine: ()}[of]
    with pytest.raises(UnsupportedModel, match=message):
        of(model, *sizes)


@pytest.mark.cases(2)
@pytest.mark.parametrize("change", [silent, per_tensor, outliers])
def test_unsupported_quantization_is_refused_under_a_live_cache_until_it_is_undone(change):
    model = float_model()
    cache = make_cache(model, block_size=4)
    assert reused(model, cache) == 0
    kept, kinds = model.state_dict(), [type(each) for each in linears(model)]
    change(model)
    before = ops.snapshot(cache.manager)
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match="quantiz"):
            cache.generate(IDS)
        with pytest.raises(UnsupportedModel, match="quantiz"), cache.session(IDS):
            pytest.fail("the block ran")
    assert ops.snapshot(cache.manager) == before
    for linear, kind in zip(linears(model), kinds, strict=True):
        linear.__class__ = kind
        linear.__dict__.pop("state", None)
    for name, values in kept.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, torch.nn.Parameter(values))
    assert [reused(model, cache) for _ in range(2)][1] == 40


def test_a_quantized_model_whose_layers_are_not_causal_is_refused_with_the_quantization_named():
    model = float_model()
    own_subclass(model)
    layer = model.model.layers[0].self_attn.k_proj
    layer.register_forward_hook(lambda _m, _a, out: out * out.abs().max())
    with pytest.raises(UnsupportedModel, match=r"not causal.*the model is quantized"):
        PrefixCache(model, "1MiB")
