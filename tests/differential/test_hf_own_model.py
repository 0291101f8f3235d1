"""The model that quire calls, and that is called with a lent cache, is the user's: what it does stays as it is."""

import copy
import inspect
import pickle

import pytest
import torch
from hf_help import make_cache, same, tiny_model

from quire.errors import ConfigError

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs")


def test_nothing_is_registered_at_the_model(own_model, ids):
    """Not even while it computes: a hook of the user's looks."""
    before = {name: len(getattr(own_model, name)) for name in HOOKS}
    seen = []
    handle = own_model.model.register_forward_hook(
        lambda *_: seen.append({name: len(getattr(own_model, name)) for name in HOOKS})
    )
    cache = make_cache(own_model, block_size=4)
    cache.generate(ids, max_new_tokens=2)
    assert "forward" not in vars(own_model)
    cache.generate(ids, max_new_tokens=2, num_beams=2)
    with cache.session(ids) as past:
        own_model(ids[:, past.get_seq_length() :], past_key_values=past)
    handle.remove()
    assert seen
    assert all(each == before for each in seen)
    assert "forward" not in vars(own_model)


def test_a_model_in_sessions_is_called_by_others_as_if_there_were_none(own_model, ids):
    plain = own_model(ids).logits
    signature = inspect.signature(own_model.forward)
    cache, other = make_cache(own_model, block_size=4), make_cache(own_model, block_size=4)
    with cache.session(ids), other.session(ids), cache.session(ids):
        torch.testing.assert_close(own_model(ids).logits, plain, atol=0, rtol=0)
        assert inspect.signature(own_model.forward) == signature
        assert torch.equal(
            own_model.generate(ids, max_new_tokens=3), cache.generate(ids, max_new_tokens=3)
        )
    assert "forward" not in vars(own_model)


@pytest.mark.cases(2)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_sessions_of_several_caches_over_one_model_end_in_any_order(own_model, ids, order):
    caches = [make_cache(own_model, block_size=4) for _ in range(2)]
    opened = [caches[index].session(ids) for index in (0, 1, 0)]
    with torch.no_grad():
        pasts = [each.__enter__() for each in opened]
        for past in pasts:
            own_model(ids, past_key_values=past)
    for index in order:
        opened[index].__exit__(None, None, None)
        assert caches[index % 2].last.unknown_tokens == 0
    assert "forward" not in vars(own_model)
    for cache in caches:
        same(own_model, cache, ids)
        assert cache.last.cached_tokens == 40


def test_a_forward_that_the_user_sets_in_a_session_stays(own_model, ids):
    cache, plain = make_cache(own_model, block_size=4), own_model.forward
    with cache.session(ids):
        own_model.forward = plain
    assert vars(own_model)["forward"] is plain


def test_copies_of_a_model_in_a_session_are_copies_of_the_original(own_model, ids):
    cache = make_cache(own_model, block_size=4)
    with cache.session(ids):
        for twin in (copy.deepcopy(own_model), pickle.loads(pickle.dumps(own_model))):  # noqa: S301
            assert type(twin) is type(own_model)
            assert twin.forward.__self__ is twin
            assert torch.equal(twin(ids).logits, own_model(ids).logits)


def test_hidden_states_that_are_asked_for_make_it_no_other_model(own_model, ids):
    """transformers hooks its modules for good when they are asked for first."""
    cache = make_cache(own_model, block_size=4)
    with cache.session(ids) as past, torch.no_grad():
        own_model(ids, past_key_values=past, output_hidden_states=True)
    assert cache.last.stored_tokens == 40
    same(own_model, cache, ids)
    assert cache.last.cached_tokens == 40


def test_hooks_of_the_user_get_the_model_and_change_what_it_returns(own_model, ids):
    modules = []

    def shift(module, args, kwargs, output):
        modules.append(module)
        output.logits = output.logits.roll(1, -1)
        return output

    own_model.register_forward_hook(shift, with_kwargs=True)
    cache = make_cache(own_model, block_size=4)
    for _ in range(2):
        same(own_model, cache, ids)
    assert cache.last.cached_tokens == 40
    assert all(module is own_model for module in modules)


def test_a_forward_wrapped_on_the_instance_is_used(own_model, ids):
    """Libraries that move layers between devices replace `model.forward` so."""
    plain, calls = own_model.forward, []

    def wrapped(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    own_model.forward = wrapped
    wrapped.__wrapped__ = plain
    cache = make_cache(own_model, block_size=4)
    for _ in range(2):
        same(own_model, cache, ids)
    assert cache.last.cached_tokens == 40
    assert calls


def test_a_compiled_forward_is_used(own_model, ids, monkeypatch):
    calls = []

    def compiled(function):
        return lambda *args, **kwargs: (calls.append(1), function(*args, **kwargs))[1]

    monkeypatch.setattr(torch, "compile", compiled)  # compiling takes a minute
    own_model.compile()
    cache = make_cache(own_model, block_size=4)
    for _ in range(2):
        same(own_model, cache, ids)
    assert cache.last.cached_tokens == 40
    assert calls


def test_a_generate_of_the_instance_runs_on_what_is_watched(own_model, ids):
    def generate(self, *args, **kwargs):
        return type(own_model).generate(self, *args, **{**kwargs, "max_new_tokens": 3})

    own_model.generate = generate.__get__(own_model)
    cache = make_cache(own_model, block_size=4)
    assert cache.generate(ids).shape[1] == 44
    assert cache.generate(ids).shape[1] == 44
    assert cache.last.cached_tokens == 40


def test_a_generate_that_cannot_be_watched_is_refused(own_model, ids):
    own_model.generate = lambda *args, **kwargs: None
    cache = make_cache(own_model, block_size=4)
    with pytest.raises(ConfigError, match=r"replaced by .*lambda"):
        cache.generate(ids)
    assert cache.manager.num_active == 0
    del own_model.generate
    same(own_model, cache, ids)


def test_a_model_in_a_session_has_caches_of_its_own(model, cache, ids):
    with cache.session(ids):
        again = make_cache(model, block_size=4)
        for _ in range(2):
            same(model, again, ids)
        assert again.last.cached_tokens == 40


def test_an_assistant_is_another_model(model, cache, ids):
    assistant = tiny_model("llama", seed=1)
    for _ in range(2):
        same(model, cache, ids, assistant_model=assistant)
    assert cache.last.cached_tokens == 40
