"""Several threads and several calls at once: over one model, and in one cache."""

import functools
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers
from hf_help import check_stored, make_cache, random_ids, same, tiny_model

from quire import ops
from quire.engines.hf import SlotPrefixCache
from quire.errors import CacheBusy
from turns import by_turns


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
        for _ in range(20):
            assert torch.equal(cache.generate(ids, max_new_tokens=2), expected)

    def theirs():
        for _ in range(50):
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
            for _ in range(12):
                assert torch.equal(cache.generate(tokens, max_new_tokens=3), expected)
                with cache.session(tokens) as past:
                    cache.model(tokens[:, past.get_seq_length() :], past_key_values=past)
            assert cache.last.cached_tokens == tokens.shape[1] - 1
            ops.check(cache.manager)

        return run

    together(one(ids), one(other))


# -- one cache, several threads and calls at once ------------------------------------------------


class Between(transformers.generation.BaseStreamer):
    """Does something whenever generate hands over a token."""

    def __init__(self, act):
        self.act = act

    def put(self, value):
        self.act()

    def end(self):
        pass


@pytest.mark.usefixtures("_switching")
def test_a_second_thread_is_refused_and_nothing_is_harmed(model, cache):
    texts = [random_ids(torch.Generator().manual_seed(seed), 40) for seed in range(3)]
    expected = [model.generate(text, max_new_tokens=2) for text in texts]
    counts = {"done": 0, "refused": 0}

    def use(at):
        for turn in range(30):
            try:
                if turn % 3:
                    out = cache.generate(texts[at], max_new_tokens=2)
                else:
                    with cache.session(texts[at]) as past:
                        out = cache.model.generate(
                            texts[at], past_key_values=past, max_new_tokens=2
                        )
                    repr(cache)
                assert torch.equal(out, expected[at])
                counts["done"] += 1
            except CacheBusy:
                counts["refused"] += 1
            cache.stats, cache.memory(), repr(cache)

    together(*(functools.partial(use, at) for at in range(3)))
    assert counts["done"] >= 1
    ops.check(cache.manager)
    assert cache.manager.num_active == 0
    for text in texts:
        check_stored(model, cache, text[0])
        same(model, cache, text)


@pytest.fixture
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


CALLS = {
    "generate": lambda cache, ids: cache.generate(ids),
    "session": lambda cache, ids: cache.session(ids).__enter__(),
    "explain": lambda cache, ids: cache.explain(ids),
    "prefetch": lambda cache, ids: cache.prefetch(ids),
    "clear": lambda cache, ids: cache.clear(),
    "end_session": lambda cache, ids: cache.end_session("a"),
    "snapshot": lambda cache, ids: cache.snapshot(),
    "save": lambda cache, ids: cache.save("kv"),
    "load": lambda cache, ids: cache.load("kv"),
    "close": lambda cache, ids: cache.close(),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("where", ["a call", "a session"])
@pytest.mark.usefixtures("_folder")
def test_calls_from_another_thread_are_refused(cache, ids, name, where):
    errors = []

    def elsewhere():
        def run():
            before = cache.manager.num_active, cache.manager.num_cached
            with pytest.raises(CacheBusy, match="MainThread"):
                CALLS[name](cache, ids)
            assert (cache.manager.num_active, cache.manager.num_cached) == before

        try:
            together(run)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    if where == "a call":
        cache.generate(ids, max_new_tokens=2, streamer=Between(elsewhere))
    else:
        with cache.session(ids):
            elsewhere()
    assert not errors
    assert not list(Path().iterdir())
    together(lambda: CALLS[name](cache, ids) if name != "load" else None)


@pytest.mark.parametrize("of", ["blocks", "slots"])
def test_threads_of_a_cache_that_waits_take_turns(model, of):
    texts = [random_ids(torch.Generator().manual_seed(seed), 30) for seed in range(3)]
    expected = [model.generate(text, max_new_tokens=2) for text in texts]
    if of == "blocks":
        cache = make_cache(model, block_size=4, wait_s=600)
    else:
        cache = SlotPrefixCache(model, num_slots=4, max_tokens=64, wait_s=600)

    def use(at):
        for _ in range(3):
            assert torch.equal(cache.generate(texts[at], max_new_tokens=2), expected[at])
            with cache.session(texts[at]):
                pass

    together(*(functools.partial(use, at) for at in range(3)))


def test_a_slot_cache_refuses_a_second_thread(model, ids):
    cache = SlotPrefixCache(model, num_slots=3, max_tokens=64)
    with cache.session(ids) as session:

        def elsewhere():
            for use in (
                lambda: cache.generate(ids),
                lambda: cache.session(ids).__enter__(),
                lambda: session.feed(ids),
            ):
                with pytest.raises(CacheBusy):
                    use()

        together(elsewhere)
        session.feed(ids)
        assert torch.equal(
            cache.generate(ids, max_new_tokens=3), model.generate(ids, max_new_tokens=3)
        )
    together(lambda: cache.generate(ids, max_new_tokens=3))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("family", "num_blocks"), by_turns(["llama", "gemma2", "qwen3_next"], [30, 400])
)
def test_calls_within_streamers_and_sessions_have_the_plain_tokens(family, num_blocks):
    """Within a streamer of the same cache, in open sessions, over texts that share what is kept."""
    model = tiny_model(family)
    cache = make_cache(model, block_size=4, num_blocks=num_blocks)
    text = random_ids(torch.Generator().manual_seed(1), 60)
    outer, inner = text[:, :50], text[:, :37]
    expected = [model.generate(ids, max_new_tokens=3) for ids in (outer, inner)]

    def act():
        assert torch.equal(cache.generate(inner, max_new_tokens=3), expected[1])
        with cache.session(inner) as past:
            out = cache.model.generate(inner, past_key_values=past, max_new_tokens=3)
            assert torch.equal(out, expected[1])

    for _ in range(2):
        out = cache.generate(outer, max_new_tokens=3, streamer=Between(act))
        assert torch.equal(out, expected[0])
        with cache.session(outer) as past:
            act()
            out = cache.model.generate(
                outer, past_key_values=past, max_new_tokens=3, streamer=Between(act)
            )
            assert torch.equal(out, expected[0])
        ops.check(cache.manager)
        assert cache.manager.num_active == 0
    for ids in expected:
        check_stored(model, cache, ids[0])
