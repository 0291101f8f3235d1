"""A cache that is dropped goes with all it held, whatever was done with it."""

import gc
import weakref

import pytest
import torch
from hf_help import StopHereError, make_cache, own, random_ids

from quire.errors import QuireError
from turns import by_turns

IDS = random_ids(torch.Generator().manual_seed(3), 40)


def generated(model, cache):
    cache.generate(IDS, max_new_tokens=3)
    cache.generate(IDS, max_new_tokens=3)


def in_a_session(model, cache):
    with cache.session(IDS) as past:
        model.generate(IDS, past_key_values=past, max_new_tokens=3)


def in_a_session_left_open(model, cache):
    past = cache.session(IDS).__enter__()
    with torch.no_grad():
        model(IDS, past_key_values=past)


def refused(model, cache):
    with pytest.raises(QuireError):
        cache.generate(IDS[:, :0], max_new_tokens=3)


def failed_in_a_forward(model, cache):
    def stop(module, args):
        raise StopHereError

    handle = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(StopHereError):
        cache.generate(IDS, max_new_tokens=3)
    handle.remove()


def with_an_adapter(model, cache):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["k_proj", "v_proj"])
    wrapped = peft.get_peft_model(model, config).eval()
    generated(model, cache)
    with wrapped.disable_adapter():
        generated(model, cache)
    wrapped.unload()
    generated(model, cache)


@pytest.mark.cases(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("use", "first", "family"),
    by_turns(
        [
            generated,
            in_a_session,
            in_a_session_left_open,
            refused,
            failed_in_a_forward,
            with_an_adapter,
        ],
        ["cache", "model"],
        ["llama", "gemma3_text"],
    ),
)
def test_a_dropped_cache_and_its_model_are_freed(family, use, first):
    """And each alone: a model outlives the caches that it had."""
    model = own(family)
    cache = make_cache(model, block_size=4)
    use(model, cache)
    held = [weakref.ref(part) for part in (cache, cache.manager, cache.manager.kernel.tree)]
    weight = weakref.ref(model)
    if first == "cache":
        del cache
        gc.collect()
        assert [part() for part in held] == [None] * len(held)
        del model
    else:
        del model, cache
    gc.collect()
    assert [part() for part in (weight, *held)] == [None] * (len(held) + 1)
