"""A call that is cut off at any bytecode leaves a sound manager, or one that refuses all but `reset`."""

import zlib
from itertools import cycle
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from core_help import prefill, rejected, run, serve, state
from hybrid_help import make, serve_in_pieces

from interrupt_help import BytecodeCut
from quire import errors, ops
from quire.core import CacheManager, FullAttention, Hint, MediaItem, Scope
from quire.exchange import hold, required_blocks, residency, restore
from quire.groups import ChunkedAttention, Recurrent, SlidingWindow
from watching import take_events, take_evicted, watchers, what_if

SAMPLES, LONG = 5, 1000
"""So many places of each call are tried by default, in one mix, and in the long run, in each; half of the calls have fewer."""

FULL = ("full", 40, FullAttention())
MIXES = {
    "full": ([FULL], "lru"),
    "windows": ([FULL, ("w", 24, SlidingWindow(9, sinks=2, interval=8))], "lfu"),
    "all": ([FULL, ("c", 30, ChunkedAttention(8)), ("s", 9, Recurrent(8))], "learned"),
}
IMAGE = MediaItem(b"i" * 32, 2, 9)
PROMPT = run(0, 30)


def build(mix):
    """Return a manager in which much goes on, and what is open."""
    groups, policy = MIXES[mix]
    now = [0.0]
    m = make(
        *groups,
        policy=policy,
        watchers=watchers(events=True, evictions=True, curve=True),
        pin_budget=1.0,
        clock=lambda: now[0],
    )
    for tail in range(3):
        hint = Hint("session", session_id="s", ttl_s=50)
        serve(m, [*PROMPT[:18], *run(1000 * tail, 9)], hint=hint, priority=tail)
        now[0] += 1
    serve(m, run(4000, 17), Scope(salt="x"), media=[IMAGE])
    a = prefill(m, PROMPT[:22])
    b = m.fork(a)
    c = m.open(run(2000, 23), priority=2)
    m.reserve(c, 10)
    m.take_copies()
    m.commit(c, run(2000, 6))
    d = prefill(m, run(3000, 9), Scope(salt="x"))
    m.suspend(d)
    e = m.fork(a)
    m.take_copies()
    f = prefill(m, run(6000, 6))
    pins = [ops.pin(m, PROMPT[:12]), ops.pin(m, run(1000, 5), ttl_s=3)]
    now[0] += 5
    m.take_copies()
    return SimpleNamespace(m=m, a=a, b=b, c=c, d=d, e=e, f=f, pins=pins, batch=m.batch([a, b]))


def restoring(w):
    here = residency(w.m, [*run(7000, 16), 0])
    brought = {g: required_blocks(w.m, g, 4) for g in range(len(w.m.pools))}
    w.m.take_copies()
    assert here.accepted == 0
    return restore(w.m, run(7000, 16), 4, brought)


def stepped(w):
    w.m.reserve_step(w.batch)
    w.m.take_copies()


CALLS = {
    "open": lambda w: w.m.open([*PROMPT, 7], priority=1, hint=Hint("session", session_id="s")),
    "open media": lambda w: w.m.open(run(4000, 20), Scope(salt="x"), media=[IMAGE]),
    "open another scope": lambda w: w.m.open(PROMPT, Scope(salt="new")),
    "reserve": lambda w: w.m.reserve(w.c, 40),
    "commit": lambda w: w.m.commit(w.c, run(2006, 4)),
    "truncate": lambda w: ops.truncate(w.m, w.a, 16),
    "fork": lambda w: w.m.fork(w.c),
    "suspend": lambda w: w.m.suspend(w.c),
    "resume": lambda w: w.m.resume(w.d),
    "close": lambda w: w.m.close(w.b),
    "reserve_step": lambda w: w.m.reserve_step(w.batch),
    "take_copies": lambda w: w.m.take_copies(),
    "tables": lambda w: w.m.tables([w.a, w.e]),
    "blocks_at": lambda w: ops.blocks_at(w.m, [w.a, w.e], np.array([[0], [0]])),
    "block_ids": lambda w: w.e.block_ids(),
    "grow": lambda w: ops.resize(w.m, {"full": 34}),
    "shrink": lambda w: ops.resize(w.m, {"full": w.m.num_active + w.m.num_cached}),
    "usage": lambda w: ops.usage(w.m),
    "pin": lambda w: ops.pin(w.m, run(1000, 9), ttl_s=9),
    "unpin": lambda w: w.pins[0].close(),
    "evict": lambda w: ops.invalidate(w.m, PROMPT[:8]),
    "reclaim": lambda w: ops.reclaim(w.m, 9),
    "clear": lambda w: ops.clear(w.m),
    "end_session": lambda w: w.m.end_session("s"),
    "take_events": lambda w: take_events(w.m),
    "take_evicted": lambda w: take_evicted(w.m),
    "hold": lambda w: hold(w.m, w.c),
    "restore": restoring,
    "stats": lambda w: w.m.stats,
    "what_if": lambda w: what_if(w.m),
    "probe": lambda w: w.m.probe([*PROMPT[:18], 999]),
    "explain": lambda w: ops.explain(w.m, PROMPT, Scope(salt="x")),
    "residency": lambda w: residency(w.m, PROMPT),
    "fits": lambda w: ops.fits(w.m, w.c, 60),
    "snapshot": lambda w: ops.snapshot(w.m),
    "check": lambda w: ops.check(w.m),
}
AFTER = {
    "commit_step": (stepped, lambda w, _: w.m.commit_step(w.batch, [1, 2])),
    "close a session": (
        lambda w: w.m.open(PROMPT[:19], hint=Hint("never")),
        lambda w, seq: w.m.close(seq),
    ),
    "commit a restore": (restoring, lambda _, restore: restore.commit()),
    "leave a restore": (restoring, lambda _, restore: restore.__exit__()),
    "release a hold": (lambda w: hold(w.m, w.c), lambda _, release: release()),
    "reset": (lambda w: None, lambda w, _: w.m.reset()),
}


def prepared(mix, name):
    """Return a world and the call to cut off, which is ready to be made."""
    w = build(mix)
    if name in CALLS:
        return w, lambda: CALLS[name](w)
    prepare, call = AFTER[name]
    ready = prepare(w)
    return w, lambda: call(w, ready)


def check_barred(w):
    """Nothing but `reset` is left, letting go is silent, and a reset manager is as new."""
    m = w.m
    for name in ("open", "probe", "stats", "num_free", "sequences", "clear", "kernel"):
        with pytest.raises(errors.Interrupted, match=r"cut off half-way .* reset\(\)"):
            getattr(m, name)
    for seq in (w.a, w.c):
        with pytest.raises(errors.Interrupted):
            seq.block_ids()
    assert "reset()" in repr(m)
    for pin in w.pins:
        if pin.open:
            pin.close()
    m.reset()
    check_new(w)


def check_new(w):
    m = w.m
    ops.check(m)
    assert type(m) is CacheManager
    assert m.num_free == m.pools[0].num_blocks
    assert (m.sequences, m.kernel.holds.all) == ({}, {})
    assert m.probe(PROMPT).num_tokens == 0
    for seq in (w.a, w.c, w.d):
        with rejected(m, errors.SequenceError):
            m.close(seq)
    serve_in_pieces(m, PROMPT)
    assert m.probe(PROMPT).num_tokens > 0
    ops.check(m)


def cut_everywhere(mix, name, samples, error=KeyboardInterrupt):
    w, call = prepared(mix, name)
    before = state(w.m)
    whole = BytecodeCut(error=error)
    whole.run(call)
    after = state(w.m)
    barred = 0
    places = range(1, whole.count + 1)
    if samples < len(places):
        places = sorted(Random(zlib.crc32(f"{mix} {name}".encode())).sample(places, samples))
    for at in places:
        w, call = prepared(mix, name)
        assert state(w.m) == before, "the worlds are not the same"
        BytecodeCut(at, error).run(call)
        if w.m.interrupted:
            barred += 1
            check_barred(w)
        else:
            ops.check(w.m)
            assert state(w.m) in (before, after), f"cut at {at} of {whole.count}: between"
    return barred


@pytest.mark.cases(3)
@pytest.mark.parametrize(("name", "mix"), [*zip([*CALLS, *AFTER], cycle(MIXES))])
def test_a_call_that_is_cut_off_happens_whole_or_bars_the_manager(mix, name):
    cut_everywhere(mix, name, SAMPLES)


def test_want_of_memory_cuts_off_as_ctrl_c_does():
    assert cut_everywhere("windows", "reserve", SAMPLES, MemoryError) > 0


@pytest.mark.long
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", [*CALLS, *AFTER])
def test_a_call_that_is_cut_off_anywhere_happens_whole_or_bars_the_manager(mix, name):
    cut_everywhere(mix, name, LONG)
