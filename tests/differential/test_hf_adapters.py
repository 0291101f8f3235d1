"""Every kind of adapter of the installed PEFT, through its whole life, beside a model without a cache."""

import contextlib
import random
import warnings

import pytest
import torch

peft = pytest.importorskip("peft")

from hf_help import make_cache, random_ids, same  # noqa: E402
from peft.utils import hotswap  # noqa: E402
from peft_help import (  # noqa: E402
    KINDS,
    LEARNED_PROMPTS,
    VARIANTS,
    CannotBuildError,
    config_of,
    disturb,
    wrapped_model,
)

from quire import ops  # noqa: E402
from quire.engines.hf import PrefixCache  # noqa: E402
from quire.errors import UnsupportedModel  # noqa: E402
from turns import few  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
IDS = random_ids(torch.Generator().manual_seed(3), 21)
IN_MODULES = sorted(set(KINDS) - LEARNED_PROMPTS) + sorted(VARIANTS)
NOT_BUILT = {
    "ADAMSS": "scikit-learn",
    "XLORA": "use_cache",
    "POLY": "task_ids",
    "SHADOW": "ShadowCarrier",
}
NOT_DONE = (NotImplementedError, ValueError, TypeError, AttributeError, KeyError, RuntimeError)
"""What PEFT raises for what it does not do with a kind of adapter."""
REFUSED = {"LILY": "depend on the tokens that follow"}


def swap(wrapped, kind, seed):
    """Put the weights of another adapter in the place of one, in the same tensors."""
    state = wrapped_model(kind, seed).state_dict()
    state = {
        name: values for name, values in state.items() if "lora_" in name and ".default" in name
    }
    hotswap.hotswap_adapter_from_state_dict(wrapped, state, "default", config_of(kind))


class AdapterLife:
    """One model with adapters, and a cache of it that lives through all that is done to them."""

    def __init__(self, kind, seed):
        self.kind, self.random = kind, random.Random(seed)
        self.wrapped = wrapped_model(kind, seed)
        self.model = self.wrapped.get_base_model()
        self.cache = make_cache(self.random.choice([self.model, self.wrapped]), block_size=4)
        self.names = ["default"]

    def check(self):
        """The cache answers as the model does; asked again, it hits."""
        for _ in range(2):
            same(self.model, self.cache, IDS, max_new_tokens=2)
        assert self.cache.last.cached_tokens == 20
        ops.check(self.cache.manager)

    def step(self, name):
        """Do one thing; what PEFT does not do for this kind counts as nothing done."""
        with warnings.catch_warnings(), contextlib.suppress(*NOT_DONE):
            warnings.simplefilter("ignore")
            getattr(self, name)()
        self.model.eval()

    def computes(self):
        """Whether the model itself computes: PEFT may have stopped half way, or activated what it cannot run."""
        with torch.no_grad(), contextlib.suppress(*NOT_DONE):
            self.model(IDS)
            return True
        return False

    def add(self):
        name = f"n{len(self.names)}{self.random.randrange(1000)}"
        self.wrapped.add_adapter(name, config_of(self.kind))
        self.names.append(name)
        self.wrapped.set_adapter(name)
        disturb(self.wrapped)

    def activate(self):
        self.wrapped.set_adapter(self.random.choice(self.names))

    def activate_two(self):
        self.wrapped.base_model.set_adapter(self.random.sample(self.names, min(2, len(self.names))))

    def disable(self):
        self.wrapped.base_model.disable_adapter_layers()

    def enable(self):
        self.wrapped.base_model.enable_adapter_layers()

    def train(self):
        disturb(self.wrapped)

    def train_base(self):
        with torch.no_grad():
            self.model.get_input_embeddings().weight.mul_(1.05)

    def merge(self):
        self.wrapped.merge_adapter()

    def merge_safely(self):
        self.wrapped.merge_adapter(safe_merge=True)

    def unmerge(self):
        self.wrapped.unmerge_adapter()

    def delete(self):
        if len(self.names) > 1:
            name = self.names.pop()
            self.wrapped.delete_adapter(name)
            self.wrapped.set_adapter(self.names[0])

    def scale(self):
        for module in self.wrapped.modules():
            if hasattr(module, "scale_layer") and getattr(module, "scaling", None):
                module.scale_layer(1.5)

    def combine(self):
        name = f"w{self.random.randrange(10000)}"
        self.wrapped.add_weighted_adapter(self.names[:2], [0.7] * len(self.names[:2]), name,
                                          combination_type="linear")  # fmt: skip
        self.names.append(name)
        self.wrapped.set_adapter(name)

    def swap(self):
        swap(self.wrapped, self.kind, self.random.randrange(1000))

    def end_merged(self):
        self._again(self.wrapped.merge_and_unload())

    def end(self):
        self._again(self.wrapped.unload())

    def _again(self, model):
        assert model is self.model
        self.check()
        self.wrapped = peft.get_peft_model(self.model, config_of(self.kind)).eval()
        self.names = ["default"]
        disturb(self.wrapped)


STEPS = [
    "add", "activate", "activate_two", "disable", "enable", "train", "train_base", "merge", "merge_safely",
    "unmerge", "delete", "scale", "combine", "swap", "end_merged", "end",
]  # fmt: skip


def live(kind, seed, num_steps):
    try:
        life = AdapterLife(kind, seed)
    except (CannotBuildError, UnsupportedModel) as error:
        sorted_out = NOT_BUILT if isinstance(error, CannotBuildError) else REFUSED
        if sorted_out.get(kind, "not expected") not in str(error):
            raise
        return
    assert kind not in {**NOT_BUILT, **REFUSED}
    life.check()
    for _ in range(num_steps):
        life.step(life.random.choice(STEPS))
        if not life.computes():
            life.step("activate")
        if not life.computes():
            return
        life.check()


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", few(IN_MODULES, *IN_MODULES[::5]))
def test_tokens_with_each_kind_of_adapter_equal_those_without_a_cache(kind):
    live(kind, seed=1, num_steps=3)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("kind", IN_MODULES)
def test_long_lives_of_each_kind_of_adapter(kind, seed):
    live(kind, seed, num_steps=20)


@pytest.mark.parametrize("kind", sorted(LEARNED_PROMPTS))
def test_learned_prompts_are_refused_without_advice_that_drops_them(kind):
    wrapped = wrapped_model(kind)
    with pytest.raises(UnsupportedModel, match=r"own model\.generate") as refused:
        PrefixCache(wrapped, "1MiB")
    assert "get_base_model() of an adapter" not in str(refused.value)


def ask(model, cache):
    same(model, cache, IDS, max_new_tokens=2)
    return cache.last.cached_tokens


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "kind", ["LORA", "LOHA", "VERA", "FOURIERFT", "VBLORA", "OFT", "LN_TUNING"]
)
def test_switching_off_and_on_finds_what_each_had(kind):
    wrapped = wrapped_model(kind)
    model = wrapped.get_base_model()
    cache = make_cache(model, block_size=4)
    assert ask(model, cache) == 0
    with wrapped.disable_adapter():
        assert ask(model, cache) == 0
    for _ in range(2):
        assert ask(model, cache) == 20
        with wrapped.disable_adapter():
            assert ask(model, cache) == 20


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ["LORA", "LOHA", "TRAINABLE_TOKENS", "SHIRA", "LN_TUNING"])
def test_an_adapter_that_stays_in_the_weights_is_not_taken_for_the_base(kind):
    wrapped = wrapped_model(kind)
    model = wrapped.get_base_model()
    cache = make_cache(model, block_size=4)
    with wrapped.disable_adapter():
        assert ask(model, cache) == 0
    assert ask(model, cache) == 0
    assert wrapped.merge_and_unload() is model
    assert [ask(model, cache) for _ in range(2)] == [0, 20]


def test_hot_swapped_weights_are_others():
    wrapped = wrapped_model("LORA")
    model = wrapped.get_base_model()
    cache = make_cache(model, block_size=4)
    assert ask(model, cache) == 0
    swap(wrapped, "LORA", 1)
    assert [ask(model, cache) for _ in range(2)] == [0, 20]


def test_an_adapter_that_is_not_causal_is_refused_when_it_comes():
    wrapped = wrapped_model("LORA")
    model = wrapped.unload()
    cache = make_cache(model, block_size=4)
    assert ask(model, cache) == 0
    lily = peft.get_peft_model(model, config_of("LILY")).eval()
    disturb(lily)
    before = ops.snapshot(cache.manager)
    with pytest.raises(UnsupportedModel, match="depend on the tokens that follow"):
        cache.generate(IDS)
    assert ops.snapshot(cache.manager) == before
    lily.unload()
    assert ask(model, cache) == 20


def test_the_strength_of_one_of_two_adapters_counts():
    wrapped = wrapped_model("LORA")
    model = wrapped.get_base_model()
    wrapped.add_adapter("other", config_of("LORA"))
    model.eval()
    cache = make_cache(model, block_size=4)
    assert [ask(model, cache) for _ in range(2)] == [0, 20]
    model.model.layers[0].self_attn.k_proj.scale_layer(1.5)
    assert [ask(model, cache) for _ in range(2)] == [0, 20]
