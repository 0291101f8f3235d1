"""A call of a slot cache that is cut off at any bytecode happens whole or bars the cache."""

import zlib
from functools import partial
from random import Random
from types import SimpleNamespace

import pytest
from core_help import run

from interrupt_help import BytecodeCut
from quire import errors
from quire.core import MediaItem, Scope
from quire.slots import SlotCache, check, snapshot

SAMPLES = 40
IMAGE = MediaItem(b"i" * 32, 2, 9)


def serve(cache, tokens, scope=None, **options):
    handle = cache.open(tokens, scope, **options)
    cache.take_copies()
    cache.commit(handle, tokens[handle.num_cached :])
    cache.close(handle)


def build():
    cache = SlotCache(6, 64)
    serve(cache, run(0, 40))
    serve(cache, run(1000, 20))
    serve(cache, run(2000, 20), Scope(salt="x"), media=[IMAGE])
    a, b = cache.open(run(0, 30)), cache.open(run(3000, 12))
    cache.commit(b, run(3000, 12))
    c = cache.open(run(3000, 20))
    return SimpleNamespace(cache=cache, a=a, b=b, c=c, pin=cache.pin(run(1000, 9)))


CALLS = {
    "open": lambda w: w.cache.open(run(1000, 30)),
    "open media": lambda w: w.cache.open(run(2000, 30), Scope(salt="x"), media=[IMAGE]),
    "allocate": lambda w: w.cache.allocate(),
    "occupy": lambda w: w.cache.occupy(w.pin.slot),
    "commit": lambda w: w.cache.commit(w.b, run(9000, 5)),
    "truncate": lambda w: w.cache.truncate(w.b, 3),
    "fork": lambda w: w.cache.fork(w.b),
    "close": lambda w: w.cache.close(w.b),
    "free": lambda w: w.cache.free(w.b),
    "pin": lambda w: w.cache.pin(run(0, 12)),
    "unpin": lambda w: w.pin.close(),
    "take_copies": lambda w: w.cache.take_copies(),
    "clear": lambda w: w.cache.clear(),
    "reset": lambda w: w.cache.reset(),
    "find": lambda w: w.cache.find(run(0, 50)),
}


def check_barred(w):
    for name in ("open", "find", "stats", "num_free"):
        with pytest.raises(errors.Interrupted, match=r"reset\(\)"):
            getattr(w.cache, name)
    with pytest.raises(errors.Interrupted):
        _ = w.c.computed
    if w.pin.is_open:
        w.pin.close()
    generations = vars(vars(w.cache)["contents"])["generations"]
    w.cache.reset()
    check(w.cache)
    assert (w.cache.num_free, w.cache.find(run(0, 40))) == (6, None)
    assert min(w.cache.contents.generations) > max(generations)
    with pytest.raises(errors.SlotError):
        w.cache.close(w.c)
    serve(w.cache, run(0, 40))
    assert w.cache.find(run(0, 40)).num_tokens == 39
    check(w.cache)


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_cut_off_happens_whole_or_bars_the_cache(name):
    w = build()
    before = snapshot(w.cache)
    whole = BytecodeCut()
    whole.run(partial(CALLS[name], w))
    after = snapshot(w.cache)
    places = range(1, whole.count + 1)
    for at in Random(zlib.crc32(name.encode())).sample(places, min(SAMPLES, whole.count)):
        w = build()
        BytecodeCut(at).run(partial(CALLS[name], w))
        if w.cache.interrupted:
            check_barred(w)
        else:
            check(w.cache)
            assert snapshot(w.cache) in (before, after), f"cut at {at} of {whole.count}: between"
