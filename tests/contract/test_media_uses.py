"""Media contents are forgotten when nothing uses them, and never before; no call searches for them."""

import hashlib

import pytest
from core_help import found, prefill, run, serve
from hybrid_help import conserved

from quire import ops
from quire.core import CacheManager, MediaItem
from quire.errors import OutOfBlocks
from quire.exchange import restore
from watching import watchers

LIMIT = 4096


def picture(number, start=0, length=8):
    return MediaItem(hashlib.sha256(b"%d" % number).digest(), start, length)


def many_others(manager, first=100):
    """Requests with more contents than are remembered."""
    for number in range(first, first + LIMIT + 8):
        seq = manager.open([7] * 8 + [1], media=[picture(number)])
        manager.close(seq)


@pytest.mark.cases(1)
@pytest.mark.parametrize("commit", [True, False])
def test_an_open_restore_keeps_its_media_whatever_comes_meanwhile(commit):
    manager = CacheManager(64, 4, watchers=watchers(events=True))
    tokens, media = [7] * 8 + [*run(0, 8)], [picture(1)]
    with restore(manager, tokens, 4, {0: [0, 1, 2, 3]}, media=media) as restored:
        many_others(manager)
        assert conserved(manager)
        if commit:
            restored.commit()
    assert found(manager, tokens, media=media) == 16 * commit
    assert conserved(manager)
    if commit:
        seq = manager.open([*tokens, 9], media=media)
        assert seq.tokens.tolist() == tokens


@pytest.mark.cases(2)
@pytest.mark.parametrize("held_by", ["sequence", "fork", "suspended", "pin", "cached"])
def test_every_run_and_sequence_keeps_the_contents_in_its_key(held_by):
    manager = CacheManager(64, 4)
    tokens, media = [*run(0, 6), *[7] * 8, 1, 2, 3], [picture(1, start=6)]
    seq = prefill(manager, tokens, media=media)
    if held_by == "fork":
        twin = manager.fork(seq)
        manager.close(seq)
        seq = twin
    if held_by == "suspended":
        manager.suspend(seq)
        ops.invalidate(manager)
    if held_by in ("pin", "cached"):
        pin = ops.pin(manager, tokens, media=media)
        manager.close(seq)
        many_others(manager)
        pin.close()
    many_others(manager, first=10_000)
    assert conserved(manager)
    if held_by == "suspended":
        assert manager.resume(seq) == 17
        manager.reserve(seq, 17)
        manager.commit(seq, tokens)
    assert found(manager, tokens, media=media) == 16
    assert conserved(manager)


def test_no_request_searches_the_tree_for_contents_to_forget(monkeypatch):
    manager = CacheManager(64, 4)
    serve(manager, [7] * 8, media=[picture(1)])
    monkeypatch.setattr(manager.kernel.tree, "nodes", None)
    many_others(manager)
    monkeypatch.undo()
    assert len(manager.kernel.tree.media) == LIMIT
    assert found(manager, [7] * 8, media=[picture(1)]) == 8
    assert conserved(manager)


def test_a_decode_step_that_fills_a_block_counts_its_media():
    manager = CacheManager(64, 4)
    seq = prefill(manager, [*run(0, 1), 7, 7, 7, 7], media=[picture(1, start=1, length=4)])
    batch = manager.batch([seq])
    for token in range(7):
        manager.reserve_step(batch)
        manager.commit_step(batch, [token])
        assert conserved(manager)
    ops.truncate(manager, seq, 2)
    assert conserved(manager)
    manager.close(seq)
    ops.clear(manager)
    assert not manager.kernel.tree.media.uses
    assert conserved(manager)


def test_a_refused_restore_uses_nothing():
    manager = CacheManager(8, 4)
    seq = prefill(manager, run(0, 24))
    with pytest.raises(OutOfBlocks):
        restore(manager, [7] * 16, 4, {0: [0, 1, 2, 3]}, media=[picture(1)])
    assert not manager.kernel.tree.media.uses
    manager.close(seq)
    assert conserved(manager)
