"""Calls of an observer: every request once when it opens and once when it is closed."""

import numpy as np
import pytest
from core_help import generate, prefill, rejected, run, serve

from quire import ops
from quire.core import CacheManager, Hint, MediaItem, Scope, Watcher
from quire.errors import ConfigError, OutOfBlocks, QuireError, SequenceError, TokensError
from quire.exchange import Digests, EventLog, Spill
from quire.foresight import Learned, LiveCurve, Trail
from watching import watchers

BLOCK = 4


class Noting(Watcher):
    """Notes what it is told, and how the sequence looked then."""

    def __init__(self):
        self.told = []

    def opened(self, seq, key, missed):
        self.told.append(("opened", seq, np.frombuffer(key, np.int32).tolist()))

    def closed(self, seq):
        self.told.append(("closed", seq, seq.state, seq.computed))

    def take(self):
        told = self.told[:]
        self.told.clear()
        return told


@pytest.fixture
def watcher():
    return Noting()


@pytest.fixture
def manager(watcher):
    return CacheManager(num_blocks=16, block_size=BLOCK, watchers=watchers(observer=watcher))


def test_a_request_is_told_of_once_when_it_opens_and_once_when_it_is_closed(manager, watcher):
    seq = prefill(manager, run(0, 6))
    generate(manager, seq, run(1000, 3))
    (opened,) = watcher.take()
    assert opened[:3] == ("opened", seq, run(0, 6).tolist())
    manager.close(seq)
    assert watcher.take() == [("closed", seq, "open", 9)]


def test_a_watcher_may_read_the_hit_and_the_terms_of_a_request(manager):
    seen = []

    class Reader(Noting):
        def opened(self, seq, key, missed):
            seen.append((seq.num_cached, seq.prompt_len, seq.scope, seq.terms.hint))

        def closed(self, seq):
            seen.append((seq.computed, seq.tokens.tolist()))

    manager = CacheManager(num_blocks=16, block_size=BLOCK, watchers=watchers(observer=Reader()))
    scope, hint = Scope(salt="x"), Hint("session", session_id="a")
    serve(manager, run(0, 2 * BLOCK), scope)
    seen.clear()
    serve(manager, run(0, 2 * BLOCK + 1), scope, hint=hint)
    prompt = run(0, 2 * BLOCK + 1).tolist()
    assert seen == [(2 * BLOCK, 2 * BLOCK + 1, scope, hint), (len(prompt), prompt)]


def test_a_watcher_may_probe_and_check_the_manager_during_a_call(watcher):
    class Asking(Noting):
        def opened(self, seq, key, missed):
            assert manager.probe(run(0, BLOCK + 1)).num_tokens == 0
            ops.check(manager)

        def closed(self, seq):
            assert manager.probe(run(0, BLOCK + 1)).num_tokens == BLOCK
            ops.check(manager)

    manager = CacheManager(num_blocks=16, block_size=BLOCK, watchers=watchers(observer=Asking()))
    serve(manager, run(0, BLOCK))
    ops.check(manager)


def test_a_fork_is_told_of_when_it_is_closed(manager, watcher):
    seq = prefill(manager, run(0, 6))
    watcher.take()
    twin = manager.fork(seq)
    assert watcher.take() == []
    generate(manager, twin, [1, 2])
    manager.close(twin)
    manager.close(seq)
    assert watcher.take() == [("closed", twin, "open", 8), ("closed", seq, "open", 6)]


def test_a_pause_is_neither_an_end_nor_a_beginning(manager, watcher):
    seq = prefill(manager, run(0, 6))
    watcher.take()
    manager.suspend(seq)
    manager.resume(seq)
    manager.suspend(seq)
    assert watcher.take() == []
    manager.close(seq)
    assert [each[:3] for each in watcher.take()] == [("closed", seq, "suspended")]


def test_calls_beside_open_and_close_call_neither_hook(manager, watcher):
    serve(manager, run(0, 3 * BLOCK))
    seq = prefill(manager, run(1000, BLOCK))
    watcher.take()
    manager.probe(run(0, 9))
    ops.explain(manager, run(0, 9))
    ops.pin(manager, run(0, 9)).close()
    ops.reclaim(manager, 1)
    ops.invalidate(manager, run(0, 9))
    ops.truncate(manager, seq, 2)
    generate(manager, seq, run(1000, BLOCK)[2:])
    manager.reserve_step([seq])
    manager.commit_step([seq], [5])
    manager.end_session("a")
    ops.resize(manager, {"full": manager.pools[0].num_blocks})
    ops.clear(manager)
    ops.check(manager)
    ops.dump(manager)
    assert watcher.take() == []


def test_a_refused_request_is_not_told_of(manager, watcher):
    for bad, options, error in (
        ([], {}, TokensError),
        ([1], {"hint": "never"}, ConfigError),
        ([1], {"priority": 0.5}, ConfigError),
        (run(0, 100), {}, OutOfBlocks),
    ):
        with rejected(manager, error):
            manager.open(bad, **options)
    assert watcher.take() == []


def test_a_refused_close_calls_no_hook(manager, watcher):
    seq = prefill(manager, run(0, 6))
    manager.close(seq)
    foreign = CacheManager(num_blocks=4, block_size=BLOCK).open([1])
    watcher.take()
    for each in (seq, foreign):
        with rejected(manager, SequenceError):
            manager.close(each)
    assert watcher.take() == []


def test_the_prompt_names_media_that_the_table_knows(manager, watcher):
    picture = MediaItem(b"a" * 32, 2, 3)
    manager.reserve(manager.open(run(0, 8), media=[picture]), 1)
    ((_, seq, key),) = watcher.take()
    assert [token < 0 for token in key] == [False] * 2 + [True] * 3 + [False] * 3
    assert key[5:] == run(0, 8)[5:].tolist()
    assert manager.kernel.tree.media.contents[key[2]][0] == picture.digest
    assert seq.prompt_len == 8


def test_every_open_and_close_of_a_busy_manager_is_told_once(watcher):
    manager = CacheManager(
        num_blocks=12, block_size=BLOCK, watchers=watchers(observer=watcher), policy="lfu"
    )
    opened, closed, running = [], [], []
    for step in range(80):
        try:
            seq = prefill(manager, run(1000 * (step % 5), 3 + step % 9))
        except QuireError:
            while running:
                closed.append(running.pop())
                manager.close(closed[-1])
            for stuck in list(manager.sequences.values()):
                manager.close(stuck)  # it never had room
            continue
        opened.append(seq)
        running.append(seq)
        if step % 7 == 0:
            running.append(manager.fork(seq))
        if step % 2:
            closed.append(running.pop(step % len(running)))
            manager.close(closed[-1])
        ops.check(manager)
    told = watcher.take()
    assert [id(each[1]) for each in told if each[0] == "opened"] == [id(seq) for seq in opened]
    assert [id(each[1]) for each in told if each[0] == "closed"] == [id(seq) for seq in closed]


@pytest.mark.parametrize("kind", [Noting, EventLog, Spill, Digests, Trail, LiveCurve])
def test_a_watcher_watches_one_manager(kind):
    watcher = kind()
    first = CacheManager(num_blocks=8, block_size=BLOCK, watchers=[watcher, watcher])
    with rejected(first, ConfigError, "watches a manager already"):
        CacheManager(num_blocks=8, block_size=BLOCK, watchers=[watcher])
    serve(first, run(0, 8))
    first.reset()
    serve(first, run(0, 8))


def test_a_watcher_that_another_needs_is_added_before_it_and_once():
    alone = CacheManager(num_blocks=8, block_size=BLOCK, watchers=[LiveCurve()])
    assert [type(each) for each in alone.kernel.watchers.all] == [Trail, LiveCurve]
    trail = Trail()
    both = CacheManager(
        num_blocks=8, block_size=BLOCK, policy="learned", watchers=[LiveCurve(), trail]
    )
    assert [type(each) for each in both.kernel.watchers.all] == [Trail, LiveCurve, Learned]
    assert both.kernel.watchers.of(Trail) is trail
    both.reset()
    assert both.kernel.watchers.of(Trail) is trail
    with pytest.raises(ConfigError, match="watches a manager already"):
        CacheManager(num_blocks=8, block_size=BLOCK, watchers=[LiveCurve(), trail])


def test_a_watcher_of_a_manager_that_was_refused_is_free(watcher):
    with pytest.raises(ConfigError):
        CacheManager(num_blocks=8, block_size=0, watchers=[watcher])
    serve(CacheManager(num_blocks=8, block_size=BLOCK, watchers=[watcher]), run(0, 8))
    assert len(watcher.take()) == 2
