"""A `PeftModel` in the place of a model: what it generates, by the adapters that it has active at each call."""

import copy

import pytest
import torch
from hf_help import make_cache, random_ids
from hf_help import own as own_of

peft = pytest.importorskip("peft")

from peft_help import LEARNED_PROMPTS, config_of, disturb, wrapped_model  # noqa: E402

from quire import ops  # noqa: E402
from quire.engines.hf import PrefixCache, SlotPrefixCache  # noqa: E402
from quire.engines.loop import Engine, SamplingParams  # noqa: E402
from quire.errors import ConfigError, UnsupportedModel  # noqa: E402
from turns import by_turns  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
IDS = random_ids(torch.Generator().manual_seed(3), 41)


@pytest.fixture
def wrapped():
    """A model with two adapters, of which `default` is active."""
    model = wrapped_model("LORA")
    model.add_adapter("other", config_of("LORA"))
    model.set_adapter("other")
    disturb(model)
    model.set_adapter("default")
    return model.eval()


def reused(model, cache):
    """Generate as the model that callers hold; return the tokens that were reused."""
    expected = model.generate(input_ids=IDS, max_new_tokens=4)
    assert torch.equal(cache.generate(IDS, max_new_tokens=4), expected)
    ops.check(cache.manager)
    return cache.last.cached_tokens


def test_each_adapter_finds_what_it_has_computed(wrapped):
    cache = PrefixCache(wrapped, "1MiB", 4)
    assert cache.model is wrapped
    for found in (0, 40):
        for name in ("default", "other"):
            wrapped.set_adapter(name)
            assert reused(wrapped, cache) == found
        with wrapped.disable_adapter():
            assert reused(wrapped, cache) == found


def test_the_cache_of_a_wrapper_is_that_of_the_model_inside(wrapped):
    inner = wrapped.get_base_model()
    names = {make_cache(each, block_size=4).fingerprint for each in (wrapped, inner)}
    assert len(names) == 1


def test_a_cache_follows_the_merging_and_unloading_of_an_adapter(wrapped):
    cache = make_cache(wrapped, block_size=4)
    assert reused(wrapped, cache) == 0
    wrapped.merge_adapter()
    assert [reused(wrapped, cache) for _ in range(2)] == [0, 40]
    wrapped.unmerge_adapter()
    assert reused(wrapped, cache) in (0, 40)
    model = wrapped.merge_and_unload()
    assert [reused(model, cache) for _ in range(2)][1] == 40
    again = peft.get_peft_model(model, config_of("LORA")).eval()
    assert [reused(again, cache) for _ in range(2)] == [0, 40]


@pytest.mark.parametrize("by", ["forward", "generate"])
def test_a_session_sees_what_the_wrapper_feeds(wrapped, by):
    cache = make_cache(wrapped, block_size=4)
    for found in (0, 40):
        with cache.session(IDS) as past, torch.no_grad():
            assert past.get_seq_length() == found
            if by == "forward":
                wrapped(input_ids=IDS[:, found:], past_key_values=past, use_cache=True)
            else:
                out = wrapped.generate(input_ids=IDS, past_key_values=past, max_new_tokens=4)
                assert torch.equal(out, wrapped.generate(input_ids=IDS, max_new_tokens=4))
        assert cache.last.unknown_tokens == 0
    assert reused(wrapped, cache) == 40


def test_an_engine_follows_the_adapters_of_a_wrapper(wrapped):
    engine = Engine(wrapped, num_blocks=200, block_size=4)
    for found in (0, 40):
        for name in ("default", "other"):
            wrapped.set_adapter(name)
            expected = wrapped.generate(input_ids=IDS, max_new_tokens=4)[0, 41:].tolist()
            params = SamplingParams(max_tokens=4, temperature=0)
            (output,) = engine.generate([IDS[0].tolist()], params)
            assert list(output.outputs[0].token_ids) == expected
            assert output.num_cached_tokens == found


def test_slots_follow_the_adapters_of_a_wrapper(wrapped):
    cache = SlotPrefixCache(wrapped, 4, 128)
    for _ in range(2):
        for name in ("default", "other"):
            wrapped.set_adapter(name)
            expected = wrapped.generate(input_ids=IDS, max_new_tokens=4)
            assert torch.equal(cache.generate(IDS, max_new_tokens=4), expected)


def test_a_tier_keeps_the_adapters_of_a_wrapper_apart(tmp_path):
    pytest.importorskip("xxhash")
    from quire.tiers import Files

    for seed, found in ((0, 0), (1, 0), (0, 40), (1, 40)):
        model = wrapped_model("LORA", seed)
        with make_cache(model, block_size=4, tiers=[Files(tmp_path)]) as cache:
            assert reused(model, cache) == found


def activated(wrapped):
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["k_proj"], alora_invocation_tokens=[5, 6]
    )
    wrapped.add_adapter("activated", config)
    wrapped.set_adapter("activated")


SIZES = {PrefixCache: ("1MiB",), SlotPrefixCache: (2, 64), Engine: ()}


@pytest.mark.parametrize("of", SIZES)
def test_a_wrapper_that_computes_otherwise_than_the_model_inside_is_refused(wrapped, of):
    activated(wrapped)
    with pytest.raises(UnsupportedModel, match=r"'activated' .* activated LoRA"):
        of(wrapped.eval(), *SIZES[of])


def test_an_unsupported_adapter_is_refused_under_a_live_cache_until_it_is_off(wrapped):
    cache = make_cache(wrapped, block_size=4)
    engine = Engine(wrapped, num_blocks=200, block_size=4)
    assert reused(wrapped, cache) == 0
    activated(wrapped)
    wrapped.eval()
    before = ops.snapshot(cache.manager)
    calls = [
        lambda: cache.generate(IDS),
        lambda: cache.session(IDS).__enter__(),
        lambda: cache.explain(IDS),
        lambda: cache.prefetch(IDS),
        lambda: engine.generate([[3, 4, 5]]),
        lambda: engine.add_request([3, 4, 5]),
    ]
    for call in calls:
        with pytest.raises(UnsupportedModel, match="activated LoRA"):
            call()
    assert ops.snapshot(cache.manager) == before
    wrapped.set_adapter("default")
    assert reused(wrapped, cache) == 40


@pytest.mark.parametrize(("kind", "of"), by_turns(sorted(LEARNED_PROMPTS), SIZES))
def test_learned_prompts_are_refused_by_the_name_of_their_kind(kind, of):
    with pytest.raises(UnsupportedModel, match=rf"learned prompt \({kind}\)"):
        of(wrapped_model(kind), *SIZES[of])


def test_a_learned_prompt_that_is_switched_on_under_a_live_cache_is_refused():
    wrapped = wrapped_model("PROMPT_TUNING")
    with wrapped.disable_adapter():
        cache = make_cache(wrapped, block_size=4)
        expected = wrapped.get_base_model().generate(IDS, max_new_tokens=4)
        assert torch.equal(cache.generate(IDS, max_new_tokens=4), expected)
    with pytest.raises(UnsupportedModel, match="learned prompt"):
        cache.generate(IDS)


def test_an_argument_that_chooses_adapters_row_by_row_is_refused(wrapped):
    cache = make_cache(wrapped, block_size=4)
    with pytest.raises(ConfigError, match="adapter_names"):
        cache.generate(IDS, adapter_names=["other"])


def test_a_wrapper_in_training_mode_is_refused():
    wrapped = peft.get_peft_model(own_of("llama"), config_of("LORA")).train()
    with pytest.raises(ConfigError, match="training mode"):
        PrefixCache(wrapped, "1MiB")


# -- generation settings ---------------------------------------------------------------------------


def causal(model):
    """Wrap a model as a PeftModelForCausalLM, whose `generate` is its own."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["k_proj"])
    return peft.get_peft_model(model, config).eval()


def settings_of(model, **changes):
    settings = copy.deepcopy(model.generation_config)
    settings.update(**changes)
    return settings


@pytest.mark.cases(2)
@pytest.mark.parametrize("of", [PrefixCache, SlotPrefixCache])
@pytest.mark.parametrize("make", [causal, lambda model: peft.PeftModel(model, config_of("LORA"))])
@pytest.mark.parametrize(
    "places",
    [["wrapper"] * 2, ["model"] * 2, ["cache"] * 2, ["wrapper", "cache"], ["cache", "wrapper"]],
    ids=" then ".join,
)
def test_generation_settings_are_those_that_the_wrapper_generates_with(of, make, places):
    wrapped = make(own_of("llama")).eval()
    cache = of(wrapped, *(("1MiB", 4) if of is PrefixCache else (4, 128)))
    assert len(cache.generate(IDS)[0]) > 43
    holders = {"wrapper": wrapped, "model": wrapped.get_base_model(), "cache": cache}
    for num_new, place in zip((2, 1), places, strict=True):
        holders[place].generation_config = settings_of(wrapped, max_new_tokens=num_new)
        found = cache.generate(IDS)
        assert len(found[0]) == 41 + num_new
        assert torch.equal(found, wrapped.generate(input_ids=IDS))
        assert cache.generation_config is wrapped.get_base_model().generation_config


def test_an_engine_of_a_wrapper_ends_texts_as_the_wrapper_does():
    wrapped = causal(own_of("llama"))
    new = wrapped.generate(input_ids=IDS, max_new_tokens=3)[0, 41:].tolist()
    wrapped.generation_config = settings_of(wrapped, eos_token_id=new[0])
    (output,) = Engine(wrapped, num_blocks=200, block_size=4).generate(
        [IDS[0].tolist()], SamplingParams(max_tokens=3, temperature=0)
    )
    assert list(output.outputs[0].token_ids) == new[:1]


# -- wrappers of torch -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "of", [PrefixCache, SlotPrefixCache, Engine], ids=lambda each: each.__name__
)
def test_a_wrapper_that_spreads_a_model_over_devices_is_refused_by_name(of):
    model = torch.nn.DataParallel(own_of("llama"))
    sizes = {PrefixCache: ("1MiB",), SlotPrefixCache: (2, 64), Engine: ()}[of]
    with pytest.raises(
        UnsupportedModel,
        match=rf"is a DataParallel, .*: pass its model, {of.__name__}\(it.module\)",
    ):
        of(model, *sizes)
