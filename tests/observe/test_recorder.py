"""Recordings: what a running cache was asked for, as a trace that replays like the cache did."""

import errno
import gzip
import os

import numpy as np
import pytest

from cli_help import refusal, told
from quire import ops
from quire.core import CacheManager, Hint, MediaItem, Scope
from quire.errors import ConfigError, OutOfBlocks, TraceError
from quire.observe import Recorder, recorder
from quire_sim.replay import replay
from quire_sim.trace import open_trace
from watching import take_events, watchers

BLOCK = 4
DIGEST = b"d" * 32


class Ticks:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def path(tmp_path):
    return tmp_path / "requests.jsonl"


def tokens(*parts):
    """Return a prompt of blocks: part n is a block of tokens that only n has; a str is loose."""
    return np.concatenate([np.arange(part * 100, part * 100 + BLOCK) for part in parts]).astype(
        np.int32
    )


def managed(recording, num_blocks=64, *, events=False, **options):
    wanted = watchers(observer=recording, events=events)
    return CacheManager(num_blocks, BLOCK, watchers=wanted, **options)


def run(manager, prompt, answer=(), **options):
    """Let a request come, be answered, and go; return its cached tokens."""
    seq = manager.open(prompt, **options)
    cached = seq.num_cached
    finish(manager, seq, prompt, answer)
    return cached


def finish(manager, seq, prompt, answer=()):
    every = np.concatenate((prompt, np.array(answer, np.int32)))
    manager.reserve(seq, len(every) - seq.computed)
    manager.take_copies()
    manager.commit(seq, every[seq.computed :])
    manager.close(seq)


def rows(path):
    return list(open_trace(path))


@pytest.mark.parametrize("name", ["plain.jsonl", "packed.jsonl.gz"])
def test_a_recording_is_a_trace_of_what_was_asked(tmp_path, name):
    clock = Ticks()
    with Recorder(tmp_path / name, BLOCK, guessable=True, clock=clock) as recording:
        manager = managed(recording)
        run(manager, tokens(1, 2, 3))
        clock.now += 1.5
        seq = manager.open(tokens(1, 2, 4, 5)[:-1])
        manager.reserve(seq, 1)
        clock.now += 0.25
        finish(manager, seq, tokens(1, 2, 4, 5)[:-1], [7] * 6)
    first, second = rows(tmp_path / name)
    assert open_trace(tmp_path / name).format == "quire"
    assert (first.time_s, first.prompt_tokens, first.output_tokens) == (0.0, 12, 0)
    assert (second.time_s, second.prompt_tokens, second.output_tokens) == (1.5, 15, 6)
    assert second.duration_s == 0.25
    assert first.blocks.tolist() == [0, 1, 2]
    assert second.blocks.tolist() == [0, 1, 3]


def test_hints_and_sessions_are_recorded_with_salted_names(path):
    with Recorder(path, BLOCK, guessable=True, salt=b"a") as recording:
        manager = managed(recording, clock=Ticks())
        run(manager, tokens(1), hint=Hint("session", 60.0, "alice"))
        run(manager, tokens(2), hint=Hint(session_id="alice"))
        run(manager, tokens(3), hint=Hint("never"))
        run(manager, tokens(4))
    first, second, third, fourth = rows(path)
    assert first.session == second.session == first.hint.session_id != "alice"
    assert first.hint == Hint("session", 60.0, first.session)
    assert (second.hint, fourth.hint, fourth.session) == (None, None, None)
    assert (third.hint, third.session) == (Hint("never"), None)


def test_sessions_of_two_scopes_by_the_same_name_have_two_names(path):
    with Recorder(path, BLOCK, guessable=True) as recording:
        manager = managed(recording)
        for scope in (None, Scope(salt="one"), Scope(salt="two"), Scope(salt="one")):
            run(manager, tokens(1), scope=scope, hint=Hint(session_id="alice"))
    first, one, two, again = (row.session for row in rows(path))
    assert len({first, one, two}) == 3
    assert again == one


def test_the_same_salt_gives_the_same_file_and_another_salt_other_names(tmp_path):
    texts = []
    for place, salt in enumerate((b"one", b"one", b"two", None, None)):
        file = tmp_path / str(place)
        with Recorder(file, BLOCK, guessable=True, salt=salt, clock=Ticks()) as recording:
            manager = managed(recording)
            run(manager, tokens(1, 2), hint=Hint(session_id="alice"))
            run(manager, tokens(1, 3), hint=Hint(session_id="bob"))
        texts.append(file.read_bytes())
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4
    sessions = [{row.session for row in rows(tmp_path / str(place))} for place in (0, 2, 3, 4)]
    assert len(set.union(*sessions)) == 8


def test_neither_tokens_nor_hashes_nor_names_are_in_the_file(path):
    secret = np.full(3 * BLOCK, 987654321, np.int32)
    with Recorder(path, BLOCK, guessable=True) as recording:
        manager = managed(recording, events=True)
        run(manager, secret, scope=Scope(salt="tenant"), hint=Hint(session_id="alice"))
    stored = [digest for event in take_events(manager) for digest in event.block_hashes]
    text = path.read_bytes()
    assert b"987654321" not in text
    assert b"alice" not in text
    assert b"tenant" not in text
    for digest in stored:
        assert digest.hex()[:16].encode() not in text
    assert b"[[0,3]]" in text


def test_requests_that_overlap_stand_in_the_order_of_their_admission(path):
    clock = Ticks()
    with Recorder(path, BLOCK, guessable=True, clock=clock) as recording:
        manager = managed(recording)
        opened = []
        for part in (1, 2, 3):
            opened.append((manager.open(tokens(part)), tokens(part)))
            manager.reserve(opened[-1][0], 1)
            clock.now += 1
        for seq, prompt in reversed(opened):
            assert recording.num_requests == 0
            clock.now += 1
            finish(manager, seq, prompt)
        assert recording.num_requests == 3
    found = rows(path)
    assert [row.time_s for row in found] == [0, 1, 2]
    assert [row.duration_s for row in found] == [6, 4, 2]
    assert [row.blocks.tolist() for row in found] == [[0], [1], [2]]


def test_forks_are_no_requests(path):
    with Recorder(path, BLOCK, guessable=True) as recording:
        manager = managed(recording)
        seq = manager.open(tokens(1, 2))
        manager.reserve(seq, 8)
        manager.commit(seq, tokens(1, 2))
        twin = manager.fork(seq)
        manager.close(twin)
        manager.close(seq)
    assert len(rows(path)) == 1


def preempted(manager, prompt):
    """Return a request with two tokens after its prompt, suspended."""
    seq = manager.open(prompt)
    manager.reserve(seq, 10)
    manager.commit(seq, np.concatenate((prompt, [5, 6])).astype(np.int32))
    manager.suspend(seq)
    return seq


def test_a_request_that_is_preempted_and_goes_on_is_one_request(path):
    with Recorder(path, BLOCK, guessable=True) as recording:
        manager = managed(recording)
        seq = preempted(manager, tokens(1, 2))
        manager.resume(seq)
        finish(manager, seq, tokens(1, 2), [5, 6, 7])
    (row,) = rows(path)
    assert (row.prompt_tokens, row.output_tokens, row.num_blocks) == (8, 3, 2)


def test_a_request_that_ends_while_it_is_preempted_keeps_what_it_had(path):
    with Recorder(path, BLOCK, guessable=True) as recording:
        manager = managed(recording)
        seq = preempted(manager, tokens(1, 2))
        run(manager, tokens(3, 4, 5, 6))
        manager.close(seq)
    first, second = rows(path)
    assert (first.prompt_tokens, first.output_tokens) == (8, 2)
    assert (second.prompt_tokens, second.output_tokens) == (16, 0)


def test_scopes_and_media_share_nothing(path):
    image = (MediaItem(DIGEST, 0, BLOCK),)
    other = (MediaItem(b"e" * 32, 0, BLOCK),)
    with Recorder(path, BLOCK, guessable=True) as recording:
        manager = managed(recording)
        one, scoped = {"media": image}, {"scope": Scope(salt="a")}
        for options in ({}, scoped, one, {"media": other}, one, scoped):
            seq = manager.open(tokens(1, 2), **options)
            manager.reserve(seq, 1)
            manager.close(seq)
    found = [row.blocks.tolist() for row in rows(path)]
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7], [4, 5], [2, 3]]


@pytest.mark.parametrize("name", ["plain.jsonl", "packed.jsonl.gz"])
def test_a_crash_leaves_rows_that_can_be_read(tmp_path, name, monkeypatch):
    monkeypatch.setattr(recorder, "GZIP_BYTES", 200)
    recording = Recorder(tmp_path / name, BLOCK, guessable=True)
    manager = managed(recording)
    for part in range(50):
        run(manager, tokens(part))
    left = manager.open(tokens(60))
    manager.reserve(left, 1)
    run(manager, tokens(61))
    found = rows(tmp_path / name)  # nothing was closed
    assert len(found) == 50 if name.startswith("plain") else 40 < len(found) <= 50
    assert [row.row for row in found] == list(range(1, len(found) + 1))
    manager.close(left)


def test_rows_of_a_compressed_recording_are_written_after_ten_seconds(tmp_path):
    clock = Ticks()
    recording = Recorder(tmp_path / "t.gz", BLOCK, guessable=True, clock=clock)
    manager = managed(recording)
    run(manager, tokens(1))
    assert len(gzip.decompress((tmp_path / "t.gz").read_bytes()).splitlines()) == 1
    clock.now += 10
    run(manager, tokens(2))
    assert len(rows(tmp_path / "t.gz")) == 2


def test_a_request_that_never_had_room_is_not_recorded(path):
    with Recorder(path, BLOCK, guessable=True) as recording:
        manager = managed(recording, num_blocks=4)
        refused = manager.open(tokens(1, 2, 3, 4))
        with pytest.raises(OutOfBlocks):
            manager.reserve(refused, 5 * BLOCK)
        manager.close(refused)
        run(manager, tokens(5))
    assert [row.prompt_tokens for row in rows(path)] == [BLOCK]


def test_requests_that_still_run_at_the_end_are_written_without_their_ends(path):
    with Recorder(path, BLOCK, guessable=True) as recording:
        manager = managed(recording)
        left = manager.open(tokens(1))
        manager.reserve(left, 1)
        run(manager, tokens(2))
    manager.close(left)  # nobody is told any more
    first, second = rows(path)
    assert (first.output_tokens, first.duration_s) == (0, None)
    assert second.duration_s is not None


def test_a_request_that_never_ends_holds_up_only_so_many_rows(path, monkeypatch):
    monkeypatch.setattr(recorder, "MAX_WAITING", 5)
    recording = Recorder(path, BLOCK, guessable=True)
    manager = managed(recording)
    left = manager.open(tokens(1))
    manager.reserve(left, 1)
    for part in range(2, 12):
        run(manager, tokens(part))
    assert recording.num_requests >= 6
    manager.close(left)
    recording.close()
    assert [row.blocks.tolist() for row in rows(path)] == [[n] for n in range(11)]


def test_a_recording_ends_when_it_is_full(path):
    with Recorder(path, BLOCK, guessable=True, max_blocks=5) as recording:
        manager = managed(recording)
        for part in range(0, 12, 3):
            run(manager, tokens(part, part + 1, part + 2))
        assert recording.full
        assert "full" in repr(recording)
    assert len(rows(path)) == 2


def test_an_existing_file_and_a_missing_folder_are_refused(path):
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"cannot record to .*: File exists; name a new file"):
        Recorder(path, BLOCK, guessable=True)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot record to"):
        Recorder(path.parent / "no" / "such", BLOCK, guessable=True)


@pytest.mark.parametrize("block_size", [1, 15])
def test_blocks_that_can_be_guessed_are_refused_and_no_file_is_made(path, block_size):
    with pytest.raises(
        ConfigError, match=rf"block_size is {block_size}, .* at least 16: .*guessable=True"
    ):
        Recorder(path, block_size)
    assert not path.exists()
    Recorder(path, block_size, guessable=True).close()
    assert path.exists()


def test_blocks_of_16_tokens_are_recorded_without_a_word(path):
    Recorder(path, 16).close()
    assert path.exists()


def test_a_write_that_fails_ends_the_recording_and_not_the_request(path):
    class Full:
        closed = False

        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def close(self):
            self.closed = True

    recording = Recorder(path, BLOCK, guessable=True)
    manager = managed(recording)
    run(manager, tokens(1))
    recording._file.close()
    recording._file = Full()
    run(manager, tokens(2))
    run(manager, tokens(3))
    ops.check(manager)
    assert recording.error.errno == errno.ENOSPC
    assert "broken off (No space left on device)" in repr(recording)
    with pytest.raises(TraceError, match="broke off before request 2: No space left"):
        recording.close()
    recording.close()
    assert len(rows(path)) == 1


@pytest.mark.cases(2)
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("num_blocks", [30, 60, 120])
def test_a_replay_finds_what_the_manager_found(path, policy, num_blocks):
    rng = np.random.default_rng(num_blocks)
    with Recorder(path, BLOCK, guessable=True) as recording:
        manager = managed(recording, num_blocks, policy=policy, sub_block=False)
        talks = [rng.integers(0, 3, 9).astype(np.int32) for _ in range(30)]
        cached = []
        for _ in range(400):
            talk = int(rng.integers(len(talks)))
            talks[talk] = np.concatenate((talks[talk], rng.integers(0, 99, 4))).astype(np.int32)
            if len(talks[talk]) > 60:
                talks[talk] = talks[talk][:9]
            cached.append(run(manager, talks[talk]))
    found = []
    result = replay(
        open_trace(path), num_blocks - 1, policy, observers=[lambda _, hit: found.append(hit)]
    )
    assert found == cached
    assert result.hit_tokens == manager.stats.hit_tokens > 0
    assert result.missed["evicted"] > 0


@pytest.mark.ci
@pytest.mark.slow
def test_a_replay_finds_what_a_prefix_cache_of_a_model_found(path):
    import torch

    from quire.cli.models import load
    from quire.engines.hf import PrefixCache

    model, _ = load()
    num_blocks = 40
    rng = np.random.default_rng(5)
    with Recorder(path, BLOCK, guessable=True) as recording:
        cache = PrefixCache(model, {"full": num_blocks}, BLOCK, watchers=[recording])
        talks = [rng.integers(0, 250, 10).tolist() for _ in range(3)]
        talks += [talks[0][:9] + rng.integers(0, 250, 5).tolist() for _ in range(5)]
        cached = []
        for _ in range(45):
            place = int(rng.integers(len(talks)))
            talks[place] = talks[place] + rng.integers(0, 250, 4).tolist()
            if len(talks[place]) > 62:
                talks[place] = talks[place][:14]
            cache.generate(torch.tensor([talks[place]]), max_new_tokens=1, do_sample=False)
            whole = cache.last.cached_tokens // BLOCK * BLOCK  # parts of blocks are not in a trace
            cached.append(whole)
    found = []
    result = replay(open_trace(path), num_blocks, observers=[lambda _, n: found.append(n)])
    assert cache.manager.stats.evicted_blocks > 20
    assert result.missed["evicted"] > 0
    assert result.hit_tokens > 0
    assert found == cached


@pytest.mark.ci
def test_generate_records_what_it_asks(tmp_path):
    turns = tmp_path / "turns.txt"
    turns.write_text("What is a list?\nAnd a set?\n")
    talk = tmp_path / "talk.jsonl"
    words = ("generate", "--turns", turns, "--max-new-tokens", 4, "--record", talk)
    told(*words)
    first, second = rows(talk)
    assert first.blocks.tolist() == second.blocks[: first.num_blocks].tolist()
    assert "name a new file" in refusal(*words)
    told("replay", talk, "--capacity", "50%")
