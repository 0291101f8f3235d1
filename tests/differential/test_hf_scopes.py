"""Sharing by scope: salts, adapters and weights, through every call of `PrefixCache`."""

import pytest
import torch
from hf_help import make_cache, same

from quire import ops
from quire.core import Scope
from quire.engines.hf import SlotPrefixCache


@pytest.fixture
def model(own_model):
    return own_model


def reused(model, cache, ids, **scope):
    """Generate as the plain model does; return the tokens that were reused."""
    same(model, cache, ids, scope=Scope(**scope) if scope else None)
    return cache.last.cached_tokens


def bound_scopes(cache):
    return [root["scope"] for root in ops.snapshot(cache.manager)["roots"] if root["children"]]


# -- salts and names -----------------------------------------------------------------------


@pytest.mark.parametrize("part", ["salt", "lora"])
def test_a_part_of_the_scope_keeps_prompts_apart_in_every_call(model, cache, ids, part):
    assert [reused(model, cache, ids, **{part: name}) for name in ("a", "b", "a")] == [0, 0, 40]
    assert reused(model, cache, ids) == 0
    for name, found in (("a", 40), ("c", 0)):
        scope = Scope(**{part: name})
        assert cache.explain(ids, scope).hit.num_tokens == found
        with cache.session(ids, scope=scope) as past:
            assert past.get_seq_length() == found


def test_an_explanation_names_the_scope_that_has_it(model, cache, ids):
    reused(model, cache, ids, salt="tenant")
    told = cache.explain(ids, Scope(salt="other"))
    assert [scope.salt for scope, _ in told.found_in] == ["tenant"]
    assert "salt='tenant'" in str(told)


# -- weights changed by hand ---------------------------------------------------------------


def change(model, by=0.5):
    """A low-rank change of one projection, in place, as a hand-made adapter makes it."""
    weight = model.model.layers[0].self_attn.k_proj.weight
    generator = torch.Generator().manual_seed(9)
    low = torch.randn(weight.shape[0], 1, generator=generator)
    with torch.no_grad():
        weight.add_(low @ torch.randn(1, weight.shape[1], generator=generator), alpha=by)


def test_changed_weights_have_prefixes_of_their_own(model, cache, ids):
    assert reused(model, cache, ids) == 0
    change(model)
    assert [reused(model, cache, ids) for _ in range(2)] == [0, 40]
    assert cache.explain(ids).hit.num_tokens == 40
    with cache.session(ids) as past:
        assert past.get_seq_length() == 40


def test_changed_weights_under_a_name_have_prefixes_of_their_own(model, cache, ids):
    assert reused(model, cache, ids) == 0
    change(model)
    assert reused(model, cache, ids, lora="mine") == 0
    assert reused(model, cache, ids, lora="mine") == 40


def test_clear_accepts_changed_weights(model, cache, ids):
    assert reused(model, cache, ids) == 0
    first = cache.fingerprint
    change(model)
    assert cache.clear() > 0
    assert reused(model, cache, ids) == 0
    assert reused(model, cache, ids) == 40
    assert cache.fingerprint != first


def test_a_change_that_no_sample_shows_is_a_change(model, cache, ids):
    weight = model.model.embed_tokens.weight
    with cache.session(ids) as past, torch.no_grad():
        model(ids, past_key_values=past, use_cache=True)
        weight[int(ids[0, 20])] += 1.0
    assert cache.manager.num_cached == 0
    cache.clear()
    assert reused(model, cache, ids) == 0
    assert reused(model, cache, ids) == 40


def test_a_step_of_an_optimizer_is_noticed(model, cache, ids):
    reused(model, cache, ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert [reused(model, cache, ids) for _ in range(2)] == [0, 40]


# -- adapters ------------------------------------------------------------------------------

peft = pytest.importorskip("peft")
second_adapter = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


def add_adapter(model, name, seed, **settings):
    """Add an active adapter of random weights, not the neutral ones that training starts from."""
    torch.manual_seed(seed)
    settings = {"target_modules": ["k_proj", "v_proj"], **settings}
    config = peft.LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, **settings)
    model.add_adapter(config, name)
    model.eval()


@second_adapter
def test_each_adapter_finds_what_it_computed_itself(model, cache, ids):
    assert reused(model, cache, ids) == 0
    add_adapter(model, "cats", 1)
    assert reused(model, cache, ids) == 0
    add_adapter(model, "dogs", 2, target_modules=["q_proj", "k_proj"])
    model.set_adapter("dogs")
    assert reused(model, cache, ids) == 0
    for name in ("cats", "dogs"):
        model.set_adapter(name)
        assert reused(model, cache, ids) == 40
    model.disable_adapters()
    assert reused(model, cache, ids) == 40
    model.enable_adapters()
    model.set_adapter(["cats", "dogs"])
    assert reused(model, cache, ids) == 0
    loras = sorted(scope.split("lora=")[1].split("'")[1] for scope in bound_scopes(cache)
                   if "lora=" in scope)  # fmt: skip
    assert loras == ["cats", "cats+dogs", "dogs"]


def test_adapters_keep_apart_in_sessions_and_explanations_too(model, cache, ids):
    reused(model, cache, ids)
    add_adapter(model, "cats", 1)
    assert cache.explain(ids).hit.num_tokens == 0
    with cache.session(ids) as past:
        assert past.get_seq_length() == 0
    model.disable_adapters()
    assert cache.explain(ids).hit.num_tokens == 40


def test_an_adapter_of_the_same_name_is_told_by_its_weights(model, cache, ids):
    add_adapter(model, "cats", 1)
    assert reused(model, cache, ids) == 0
    model.delete_adapter("cats")
    add_adapter(model, "cats", 2)
    assert reused(model, cache, ids) == 0
    model.delete_adapter("cats")
    add_adapter(model, "cats", 1)
    assert reused(model, cache, ids) == 40


def test_an_adapter_in_training_is_another_after_each_step(model, cache, ids):
    add_adapter(model, "cats", 1)
    assert reused(model, cache, ids) == 0
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.lora_B["cats"].weight.mul_(1.5)
    assert reused(model, cache, ids) == 0
    assert reused(model, cache, ids) == 40


def test_the_strength_of_an_adapter_is_part_of_it(model, cache, ids):
    add_adapter(model, "cats", 1)
    assert reused(model, cache, ids) == 0
    for layer in model.model.layers:
        layer.self_attn.k_proj.set_scale("cats", 0.5)
    assert reused(model, cache, ids) == 0


def test_an_adapter_is_not_part_of_the_models_own_fingerprint(model, cache):
    alone = cache.fingerprint
    add_adapter(model, "cats", 1)
    assert make_cache(model, block_size=4).fingerprint == alone


@second_adapter
def test_a_name_of_the_callers_does_not_hide_the_adapter(model, cache, ids):
    add_adapter(model, "cats", 1)
    assert reused(model, cache, ids, lora="mine") == 0
    add_adapter(model, "dogs", 2)
    model.set_adapter("dogs")
    assert reused(model, cache, ids, lora="mine") == 0


def test_merged_adapters_are_active_adapters(model, ids):
    config = peft.LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config).eval()
    inner = wrapped.get_base_model()
    cache = make_cache(inner, block_size=4)
    assert reused(inner, cache, ids) == 0
    with wrapped.disable_adapter():
        assert reused(inner, cache, ids) == 0
    wrapped.merge_adapter()
    reused(inner, cache, ids)
    assert reused(inner, cache, ids) == 40
    wrapped.unmerge_adapter()
    with wrapped.disable_adapter():  # the weights are not what they were: they were rounded twice
        assert [reused(inner, cache, ids) for _ in range(2)] == [0, 40]
    ops.check(cache.manager)


def test_slots_tell_adapters_and_weights_apart_too(model, ids):
    slots = SlotPrefixCache(model, 4, 64)

    def ask():
        before, plain = slots.stats.hit_tokens, model.generate(ids, max_new_tokens=4)
        assert torch.equal(slots.generate(ids, max_new_tokens=4), plain)
        return slots.stats.hit_tokens - before

    assert [ask(), ask()] == [0, 40]
    add_adapter(model, "cats", 1)
    assert [ask(), ask()] == [0, 40]
    model.disable_adapters()
    assert ask() == 40
    change(model)
    assert [ask(), ask()] == [0, 40]


def test_a_session_in_which_the_adapter_is_switched_keeps_nothing(model, cache, ids):
    add_adapter(model, "cats", 1)
    with cache.session(ids) as past, torch.no_grad():
        model(ids[:, :20], past_key_values=past, use_cache=True)
        model.disable_adapters()
        model(ids[:, 20:], past_key_values=past, use_cache=True)
    assert cache.manager.num_cached == 0
    assert cache.last.stored_tokens == 0
