"""Every change of a model that can be noticed: what was computed before it is not found after it."""

import copy
import functools
import types

import pytest
import torch
from hf_help import make_cache, own, random_ids, same, tiny_model
from quantized_help import Int8, own_subclass
from torch.nn.utils import parametrizations, prune

from quire import ops
from quire.engines.hf import PrefixCache, SlotPrefixCache
from quire.errors import ConfigError, UnsupportedModel
from turns import few

IDS = random_ids(torch.Generator().manual_seed(3), 41)


@pytest.fixture
def model(own_model):
    return own_model


def reused(model, cache):
    """Generate as the plain model does; return the tokens that were reused."""
    same(model, cache, IDS, max_new_tokens=2)
    return cache.last.cached_tokens


def attention(model):
    return model.model.layers[0].self_attn


def under_inference_mode(model):
    with torch.inference_mode():
        attention(model).k_proj.weight.mul_(1.5)


def through_data(model):
    attention(model).k_proj.weight.data.mul_(1.5)


def replaced_data(model):
    attention(model).k_proj.weight.data = attention(model).k_proj.weight.data * 1.5


def exchanged(model):
    layers = model.model.layers
    one, two = layers[0].self_attn.k_proj, layers[1].self_attn.k_proj
    one.weight, two.weight = two.weight, one.weight


def exchanged_layers(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index


def pruned(model):
    prune.l1_unstructured(attention(model).k_proj, "weight", amount=0.3)


def another_rope(model):
    rope = copy.deepcopy(model.model.rotary_emb)
    rope.inv_freq.mul_(0.5)
    model.model.rotary_emb = rope


def other_frequencies(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def other_attention_scaling(model):
    attention(model).scaling *= 2


def other_rope_scaling(model):
    model.model.rotary_emb.attention_scaling = 1.2


def other_eps(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.1


def other_attention(model):
    model.set_attn_implementation("eager")


def in_the_config(model):
    model.config._attn_implementation = "eager"


def in_a_dict_of_the_config(model):
    model.config.rope_parameters["rope_theta"] = 77.0


def loaded(model):
    model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()})


def assigned(model):
    model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()}, assign=True)


def quantized_in_place(model):
    weight = attention(model).v_proj.weight
    with torch.no_grad():
        weight.copy_((weight * 8).round() / 8)


def hooked(model):
    attention(model).k_proj.register_forward_hook(lambda _m, _a, output: output * 2)


def hooked_before(model):
    model.model.layers[1].register_forward_pre_hook(lambda _m, args: (args[0] * 2, *args[1:]))


def patched_forward(model):
    own = attention(model).k_proj.forward
    attention(model).k_proj.forward = lambda states: own(states) * 2


def another_class(model):
    class Louder(torch.nn.Linear):
        def forward(self, states):
            return super().forward(states) * 2

    attention(model).k_proj.__class__ = Louder


def another_module(model):
    own = attention(model).k_proj
    attention(model).k_proj = torch.nn.Sequential(own, torch.nn.Identity(), torch.nn.Hardtanh())


def parametrized(model):
    parametrizations.weight_norm(attention(model).k_proj)


def normed_by_the_spectrum(model):
    parametrizations.spectral_norm(attention(model).v_proj)


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def transposed(model):
    projection = attention(model).q_proj
    projection.weight.data = projection.weight.data.t()


def quantized(model):
    own_subclass(model)


def quantized_in_one_place(model):
    attention(model).k_proj.weight = torch.nn.Parameter(
        Int8.of(attention(model).k_proj.weight), requires_grad=False
    )


def given_a_sparse_weight(model):
    projection = attention(model).v_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach().to_sparse())
    projection.forward = lambda states: states @ projection.weight.to_dense().t()


CHANGES = [
    under_inference_mode, through_data, replaced_data, exchanged, exchanged_layers, pruned,
    another_rope, other_frequencies, other_attention_scaling, other_rope_scaling, other_eps, other_attention,
    in_the_config, in_a_dict_of_the_config, loaded, assigned, quantized_in_place, hooked,
    hooked_before, patched_forward, another_class, another_module, parametrized, normed_by_the_spectrum,
    tied, transposed, quantized, quantized_in_one_place, given_a_sparse_weight,
]  # fmt: skip


@pytest.mark.cases(2)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_kv_from_before_a_change_of_the_model_is_not_found(model, cache, change):
    assert [reused(model, cache) for _ in range(2)] == [0, 40]
    change(model)
    assert [reused(model, cache) for _ in range(2)] == [0, 40]


@pytest.mark.cases(2)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_session_in_which_the_model_changes_keeps_nothing(model, cache, change):
    with cache.session(IDS) as past, torch.no_grad():
        model(IDS[:, :30], past_key_values=past, use_cache=True)
        change(model)
    assert cache.last.stored_tokens == 0
    assert reused(model, cache) == 0


def test_a_class_whose_forward_is_replaced_is_another(model, cache, monkeypatch):
    assert reused(model, cache) == 0
    own = type(attention(model)).forward

    def louder(self, hidden_states, *args, **kwargs):
        return own(self, hidden_states * 2, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(type(attention(model)), "forward", louder)
        assert [reused(model, cache) for _ in range(2)] == [0, 40]
    assert reused(model, cache) == 40


def test_a_hook_that_is_taken_away_leaves_what_was_there_before(model, cache):
    assert reused(model, cache) == 0
    handle = attention(model).k_proj.register_forward_hook(lambda _m, _a, output: output * 2)
    assert reused(model, cache) == 0
    handle.remove()
    assert reused(model, cache) == 40


def test_a_hook_on_all_modules_counts(model, cache):
    assert reused(model, cache) == 0

    def louder(module, _arguments, output):
        return output * 2 if module is attention(model).k_proj else output

    handle = torch.nn.modules.module.register_module_forward_hook(louder)
    try:
        assert reused(model, cache) == 0
    finally:
        handle.remove()
    assert reused(model, cache) == 40


def test_weights_that_come_back_are_found_again(model, cache):
    reused(model, cache)
    sets = [
        {name: values * factor for name, values in model.state_dict().items()}
        for factor in (1.0, 1.25)
    ]
    for number in (1, 0):
        model.load_state_dict(sets[number])
        assert reused(model, cache) == 0
    for number in (1, 0, 1):
        model.load_state_dict(sets[number])
        assert reused(model, cache) == 40


@pytest.mark.parametrize("change", [torch.nn.Module.half, torch.nn.Module.double])
def test_a_model_of_another_dtype_is_refused(model, cache, change):
    reused(model, cache)
    change(model)
    before = ops.snapshot(cache.manager)
    with pytest.raises(ConfigError, match=r"was torch\.float32 on cpu.*make a new cache"):
        cache.generate(IDS)
    with pytest.raises(ConfigError, match=r"torch\.float32"), cache.session(IDS):
        pytest.fail("the block ran")
    assert ops.snapshot(cache.manager) == before


@pytest.mark.parametrize("order", ["inside first", "outside first"])
def test_autocast_keeps_to_itself(model, cache, order):
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    found = []
    for inside in (True, False, True, False) if order == "inside first" else (False, True) * 2:
        if inside:
            with autocast:
                cache.generate(IDS, max_new_tokens=4)
            found.append(cache.last.cached_tokens)
        else:
            found.append(reused(model, cache))
    assert found == [0, 0, 40, 40]


@pytest.mark.cases(1)
@pytest.mark.parametrize("of", [PrefixCache, SlotPrefixCache])
def test_a_cache_stays_with_its_model(model, of):
    cache = PrefixCache(model, "1MiB") if of is PrefixCache else SlotPrefixCache(model, 2, 64)
    with pytest.raises(ConfigError, match=f"make a new {of.__name__}"):
        cache.model = tiny_model("qwen2")
    assert cache.model is model


# -- weights that are no parameters ---------------------------------------------------------


class Packed(torch.nn.Module):
    """A projection whose weights are integers in buffers, as quantized layers keep them."""

    def __init__(self, linear, *, persistent, attribute):
        super().__init__()
        scale = linear.weight.detach().abs().amax() / 127
        packed = (linear.weight.detach() / scale).round().to(torch.int8)
        if attribute == "list":
            self.kept = [packed]
        elif attribute:
            self.packed = packed
        else:
            self.register_buffer("packed", packed, persistent=persistent)
        self.register_buffer("scale", scale, persistent=persistent)

    def forward(self, states):
        packed = self.kept[0] if hasattr(self, "kept") else self.packed
        return torch.nn.functional.linear(states, packed.to(states.dtype) * self.scale)

    @property
    def weight(self):
        return self.kept[0] if hasattr(self, "kept") else self.packed


def packed_model(seed, **how):
    model = own("llama")
    torch.manual_seed(seed)
    for layer in model.model.layers:
        k_proj = torch.nn.Linear(32, 16, bias=False)
        layer.self_attn.k_proj = Packed(k_proj, **how)
    return model


HOW = [
    {"persistent": True, "attribute": ""},
    {"persistent": False, "attribute": ""},
    {"persistent": False, "attribute": "plain"},
    {"persistent": False, "attribute": "list"},
]


@pytest.mark.cases(2)
@pytest.mark.parametrize("how", HOW, ids=["buffer", "not persistent", "attribute", "in a list"])
def test_weights_in_buffers_name_the_model_and_their_changes_are_noticed(how):
    one, two = packed_model(1, **how), packed_model(2, **how)
    cache = make_cache(one, block_size=4)
    assert make_cache(two, block_size=4).fingerprint != cache.fingerprint
    assert make_cache(packed_model(1, **how), block_size=4).fingerprint == cache.fingerprint
    assert [reused(one, cache) for _ in range(2)] == [0, 40]
    attention(one).k_proj.weight.neg_()
    assert [reused(one, cache) for _ in range(2)] == [0, 40]


@pytest.mark.cases(2)
@pytest.mark.parametrize("how", HOW, ids=["buffer", "not persistent", "attribute", "in a list"])
def test_a_tier_keeps_models_apart_whose_weights_are_in_buffers(how, tmp_path):
    pytest.importorskip("xxhash")
    from quire.tiers import Files

    for seed, found in ((1, 0), (2, 0), (1, 40), (2, 40)):
        model = packed_model(seed, **how)
        with make_cache(model, block_size=4, tiers=[Files(tmp_path)]) as cache:
            assert reused(model, cache) == found


def test_a_tier_knows_frequencies_and_biases_that_are_buffers(tmp_path):
    pytest.importorskip("xxhash")
    from quire.tiers import Files

    for scale, found in ((1.0, 0), (0.5, 0), (1.0, 40)):
        model = own("llama")
        model.model.rotary_emb.inv_freq.mul_(scale)
        with make_cache(model, block_size=4, tiers=[Files(tmp_path)]) as cache:
            assert reused(model, cache) == found


# -- what a model notes in its own forward ---------------------------------------------------


class Counting(torch.nn.Linear):
    """A layer that counts, notes its last length, and keeps a mask of each."""

    def forward(self, states):
        length = states.shape[-2]
        self.num_calls = getattr(self, "num_calls", 0) + 1
        self.offset = torch.tensor([length])
        if hasattr(self, "seen"):
            self.seen += length
        self.last_mask = torch.ones(length, dtype=torch.bool)
        return super().forward(states)


@pytest.mark.parametrize("early", [True, False])
def test_a_counter_that_a_forward_updates_leaves_the_identity_alone(model, early):
    layer = attention(model).o_proj
    if early:
        layer.__class__ = Counting
        layer.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    cache = make_cache(model, block_size=4)
    layer.__class__ = Counting
    assert [reused(model, cache) for _ in range(3)] == [0, 40, 40]
    with cache.session(IDS) as past, torch.no_grad():
        assert past.get_seq_length() == 40
        model(IDS[:, 40:], past_key_values=past, use_cache=True)
    assert reused(model, cache) == 40
    attention(model).k_proj.weight.data.mul_(2)
    assert reused(model, cache) == 0


class Drifting(torch.nn.Linear):
    """A layer whose numbers follow what it is fed."""

    def forward(self, states):
        if hasattr(self, "mean"):
            self.mean += 0.1 * (states.shape[-2] > 16)
            return super().forward(states) * self.mean
        return super().forward(states)


def test_numbers_that_follow_the_prompt_keep_nothing(model, cache):
    layer = attention(model).k_proj
    layer.__class__ = Drifting
    layer.register_buffer("mean", torch.ones(()))
    for _ in range(3):
        cache.generate(IDS, max_new_tokens=4)
        assert (cache.last.cached_tokens, cache.last.stored_tokens) == (0, 0)


# -- what torch.compile wraps ----------------------------------------------------------------


def compiled_in_place(model):
    model.compile(backend="eager")


def compiled_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


def compiled_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")


def compiled_projection(model):
    projection = attention(model).k_proj
    projection.forward = torch.compile(projection.forward, backend="eager")


def compiled_base(model):
    model.model = torch.compile(model.model, backend="eager")


def compiled_twice(model):
    compiled_in_place(model)
    compiled_forward(model)


def compiled_projection_as_module(model):
    attention(model).k_proj = torch.compile(attention(model).k_proj, backend="eager")


def disabled(model):
    attention(model).forward = torch.compiler.disable(attention(model).forward)
    attention(model).k_proj = torch.compiler.disable(attention(model).k_proj)


def compiled_activation(model):
    for layer in model.model.layers:
        layer.mlp.act_fn.forward = torch.compile(layer.mlp.act_fn.forward, backend="eager")


COMPILED = [
    compiled_in_place,
    compiled_forward,
    compiled_twice,
    compiled_layers,
    compiled_projection,
    compiled_projection_as_module,
    compiled_base,
    compiled_activation,
    disabled,
]


PARTS_OF_A_KIND = compiled_layers, compiled_twice, compiled_base, compiled_activation
"""Entries of `COMPILED` whose code another entry compiles in the same way; only the long run has them."""


@pytest.mark.ci
@pytest.mark.parametrize(
    "change",
    few(COMPILED, *(each for each in COMPILED if each not in PARTS_OF_A_KIND)),
    ids=lambda change: change.__name__,
)
def test_a_model_that_is_compiled_has_the_name_of_the_plain_one(change):
    model = own("llama")
    change(model)
    cache = make_cache(model, block_size=4)
    assert cache.fingerprint == make_cache(own("llama"), block_size=4).fingerprint


@pytest.mark.parametrize("change", [compiled_projection, compiled_projection_as_module])
def test_kv_from_before_a_model_was_compiled_is_found(model, cache, change):
    assert [reused(model, cache) for _ in range(2)] == [0, 40]
    change(model)
    assert reused(model, cache) == 40
    model.model.layers[1].self_attn.v_proj.weight.data.mul_(1.5)
    assert reused(model, cache) == 0


def test_a_class_whose_forward_is_compiled_has_the_name_of_the_plain_one(model, cache, monkeypatch):
    kind = type(model.model.layers[0].mlp)
    monkeypatch.setattr(kind, "forward", torch.compile(kind.forward, backend="eager"))
    assert make_cache(own("llama"), block_size=4).fingerprint == cache.fingerprint


def louder(states, *, own, by=2):
    return own(states) * by


def with_other_code(projection):
    own = projection.forward
    projection.forward = torch.compile(lambda states: own(states) * 2, backend="eager")


def with_a_copy_of_attributes(projection):
    compiled = torch.compile(projection.forward, backend="eager")

    @functools.wraps(compiled)
    def forward(states):
        return compiled(states) * 2

    projection.forward = forward


def with_other_settings(projection):
    code = functools.partial(louder, own=projection.forward)
    projection.forward = torch.compile(code, backend="eager")


def with_another_call(projection):
    own = projection._call_impl
    projection._compiled_call_impl = lambda states: own(states) * 2


def with_a_method_of_another(projection):
    other = torch.nn.Linear(projection.in_features, projection.out_features, bias=False)
    projection.forward = torch.compile(other.forward, backend="eager")


def with_an_object(projection):
    class Louder:
        def __call__(self, states):
            return own(states) * 2

        __repr__ = object.__repr__

    own = projection.forward
    projection.forward = Louder()


OTHER_CODE = [
    with_other_code,
    with_a_copy_of_attributes,
    with_other_settings,
    with_another_call,
    with_a_method_of_another,
    with_an_object,
]


@pytest.mark.cases(2)
@pytest.mark.parametrize("change", OTHER_CODE, ids=lambda change: change.__name__)
def test_compiled_code_that_is_other_code_is_another_model(model, cache, change):
    assert reused(model, cache) == 0
    change(attention(model).k_proj)
    assert [reused(model, cache) for _ in range(2)] == [0, 40]


def test_hooks_of_the_wrapper_around_a_compiled_module_count(model, cache):
    compiled_projection_as_module(model)
    assert reused(model, cache) == 0
    attention(model).k_proj.register_forward_hook(lambda _m, _a, out: out * 2)
    assert [reused(model, cache) for _ in range(2)] == [0, 40]


@pytest.mark.parametrize("of", [PrefixCache, SlotPrefixCache])
def test_a_wrapper_around_a_whole_compiled_model_is_refused_with_what_to_do(model, of):
    with pytest.raises(UnsupportedModel, match=r"call model.compile\(\) in place of"):
        of(torch.compile(model, backend="eager"), *(("1MiB",) if of is PrefixCache else (2, 64)))


def test_a_model_may_be_compiled_while_a_session_is_open(model, cache):
    with cache.session(IDS) as past, torch.no_grad():
        model(IDS[:, :20], past_key_values=past, use_cache=True)
        compiled_projection(model)
        model(IDS[:, 20:], past_key_values=past, use_cache=True)
    assert cache.last.unknown_tokens == 0
    assert reused(model, cache) == 40


def given_an_attribute(projection, by):
    projection.louder = functools.partial(louder, own=None, by=by)


def given_its_forward(projection, by):
    projection.forward = functools.partial(louder, own=projection.forward, by=by)


@pytest.mark.cases(2)
@pytest.mark.parametrize("by", [2, 3])
@pytest.mark.parametrize("change", [given_an_attribute, given_its_forward])
def test_settings_that_a_function_is_given_beforehand_count_in_every_process(model, by, change):
    def name():
        made = own("llama")
        change(attention(made).k_proj, by)
        return make_cache(made, block_size=4).fingerprint

    assert name() == name()
    change(attention(model).k_proj, 1)
    assert name() != make_cache(model, block_size=4).fingerprint


def doubled(module, args, out):
    return out * 2


def test_a_hook_that_is_compiled_has_the_name_of_the_plain_one(model, cache):
    names = []
    for hook in (doubled, torch.compile(doubled, backend="eager"), torch.compiler.disable(doubled)):
        handle = attention(model).k_proj.register_forward_hook(hook)
        names.append(make_cache(model, block_size=4).fingerprint)
        handle.remove()
    assert len({*names, cache.fingerprint}) == 2
    assert len({*names}) == 1


class Scale:
    """A hook that says nothing of its factor."""

    def __init__(self, by):
        self.by = by

    def __call__(self, module, args, out):
        return out * self.by

    def __repr__(self):
        return "Scale()"


def test_hooks_that_are_objects_are_told_apart_though_they_are_drawn_alike(model, cache):
    for by in (2, 3):
        handle = attention(model).k_proj.register_forward_hook(Scale(by))
        assert reused(model, cache) == 0
        handle.remove()


def test_the_way_in_which_a_module_is_drawn_does_not_count(model, cache):
    projection = attention(model).k_proj
    draw = functools.partial(lambda own, _self: own(), projection.extra_repr)
    projection.extra_repr = types.MethodType(draw, projection)
    assert make_cache(model, block_size=4).fingerprint == cache.fingerprint
