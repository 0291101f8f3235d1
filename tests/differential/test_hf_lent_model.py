"""The model that quire calls, and lends in a session, is the user's: what it does stays as it is."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_help import make_cache, random_ids, same, tiny_model  # noqa: E402

from quire.errors import ConfigError  # noqa: E402

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs")


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.fixture
def own_model():
    """A model that a test may change."""
    return copy.deepcopy(tiny_model("llama"))


@pytest.fixture
def cache(model):
    return make_cache(model, block_size=4)


@pytest.fixture
def ids():
    return random_ids(torch.Generator().manual_seed(2), 41)


def test_nothing_is_registered_at_the_model(own_model, ids):
    """Not even while it computes: a hook of the user's looks."""
    before = {name: len(getattr(own_model, name)) for name in HOOKS}
    seen = []
    handle = own_model.model.register_forward_hook(
        lambda *_: seen.append({name: len(getattr(own_model, name)) for name in HOOKS})
    )
    cache = make_cache(own_model, block_size=4)
    cache.generate(ids, max_new_tokens=2)
    cache.generate(ids, max_new_tokens=2, num_beams=2)
    with cache.session(ids) as past:
        model(ids, past_key_values=past)
    handle.remove()
    assert seen
    assert all(each == before for each in seen)


def test_a_lent_model_is_the_original_in_all_but_its_class(own_model, ids):
    cache = make_cache(own_model, block_size=4)
    with cache.session(ids) as _:
        assert isinstance(model, type(own_model))
        assert type(model).__name__ == type(own_model).__name__
        assert model.can_generate()
        model.noted, own_model.also_noted = 1, 2
        model.eval()
        torch.testing.assert_close(model(ids).logits, own_model(ids).logits, atol=0, rtol=0)
    assert own_model.noted == 1
    assert model.also_noted == 2
    assert next(model.parameters()) is next(own_model.parameters())


def test_copies_of_a_lent_model_are_copies_of_the_original(own_model, ids):
    cache = make_cache(own_model, block_size=4)
    with cache.session(ids) as _:
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
            assert type(twin) is type(own_model)
            assert torch.equal(twin(ids).logits, own_model(ids).logits)


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


def test_a_cache_is_made_of_a_lent_model(cache, ids):
    with cache.session(ids) as _:
        pass
    again = make_cache(model, block_size=4)
    for _ in range(2):
        same(model, again, ids)
    assert again.last.cached_tokens == 40


def test_what_the_original_is_fed_is_right_and_not_kept(model, cache, ids):
    with cache.session(ids) as past:
        out = model.generate(ids, past_key_values=past, max_new_tokens=4)
    assert torch.equal(out, model.generate(ids, max_new_tokens=4))
    assert cache.last.stored_tokens == 0
    same(model, cache, ids)


def test_an_assistant_is_another_model(model, cache, ids):
    assistant = tiny_model("llama", seed=1)
    for _ in range(2):
        same(model, cache, ids, assistant_model=assistant)
    assert cache.last.cached_tokens == 40
