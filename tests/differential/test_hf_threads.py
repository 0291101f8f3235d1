"""One model, several threads and callers: what quire does with it is seen by nobody else."""

import copy
import pickle
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

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


@pytest.fixture
def _switching():
    """Threads take turns at almost every bytecode."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*jobs):
    """Run jobs in threads of their own at the same time; raise what any of them raises."""
    errors, start = [], threading.Barrier(len(jobs))

    def run(job):
        try:
            start.wait()
            job()
        except BaseException as error:  # noqa: BLE001 - raised below, where the test sees it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


# -- other callers of the model ----------------------------------------------------------------


@pytest.mark.usefixtures("_switching")
def test_plain_calls_of_the_model_run_beside_a_cache(own_model, ids):
    own_model.register_forward_pre_hook(lambda *_: time.sleep(1e-5))  # lets the other thread go on
    cache = make_cache(own_model, block_size=4)
    expected, short = own_model.generate(ids, max_new_tokens=2), ids[:, :5]
    plain = own_model(short).logits

    def ours():
        for _ in range(40):
            assert torch.equal(cache.generate(ids, max_new_tokens=2), expected)

    def theirs():
        for _ in range(100):
            assert torch.equal(own_model(short).logits, plain)

    together(ours, theirs, theirs)


def test_a_plain_call_of_the_model_goes_on_where_a_cache_was_used_within(own_model, ids):
    cache, expected = make_cache(own_model, block_size=4), own_model.generate(ids, max_new_tokens=3)
    within = []

    def use(*_):
        if not within:
            within.append(None)
            within[0] = cache.generate(ids, max_new_tokens=3)

    own_model.register_forward_pre_hook(use)
    own_model.register_forward_hook(use)
    own_model(ids)
    assert torch.equal(within[0], expected)


@pytest.mark.usefixtures("_switching")
def test_two_caches_over_one_model_run_in_two_threads(model, ids):
    other = random_ids(torch.Generator().manual_seed(3), 30)

    def one(tokens):
        cache, expected = make_cache(model, block_size=4), model.generate(tokens, max_new_tokens=3)

        def run():
            for _ in range(25):
                assert torch.equal(cache.generate(tokens, max_new_tokens=3), expected)
                with cache.session(tokens) as (lent, past):
                    lent(tokens[:, past.get_seq_length() :], past_key_values=past)
            assert cache.last.cached_tokens == tokens.shape[1] - 1
            cache.manager.check()

        return run

    together(one(ids), one(other))


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
    with cache.session(ids) as (model, past):
        model(ids, past_key_values=past)
    handle.remove()
    assert seen
    assert all(each == before for each in seen)


# -- the stand-in ---------------------------------------------------------------------------------


def test_a_lent_model_is_the_original_in_all_but_its_class(own_model, ids):
    cache = make_cache(own_model, block_size=4)
    with cache.session(ids) as (model, _):
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
    with cache.session(ids) as (model, _):
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
    with cache.session(ids) as (model, _):
        pass
    again = make_cache(model, block_size=4)
    for _ in range(2):
        same(model, again, ids)
    assert again.last.cached_tokens == 40


def test_what_the_original_is_fed_is_right_and_not_kept(model, cache, ids):
    with cache.session(ids) as (_, past):
        out = model.generate(ids, past_key_values=past, max_new_tokens=4)
    assert torch.equal(out, model.generate(ids, max_new_tokens=4))
    assert cache.last.stored_tokens == 0
    same(model, cache, ids)


def test_an_assistant_is_another_model(model, cache, ids):
    assistant = tiny_model("llama", seed=1)
    for _ in range(2):
        same(model, cache, ids, assistant_model=assistant)
    assert cache.last.cached_tokens == 40
