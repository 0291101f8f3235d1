"""Hits under bursts, small shared memory, roles and ranks: the scheduler's side with real tiers and without vLLM."""

import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest
from sides_help import BLOCK, SmallEngine

from quire.core import Scope
from quire.engines.tiered.opening import ranked
from quire.engines.vllm.figures import COUNTS, STATES
from quire.engines.vllm.staging import StagingSize
from quire.errors import ConfigError
from quire.tiers import Disk, Host, StackSettings
from quire.tiers.base import Outcome
from quire.tiers.stack.gate import Choice


def disk(tmp_path):
    return Disk(tmp_path / "kv", "16MiB")


TEXT = [(7 * at) % 50 + 1 for at in range(30)]
WHOLE = (len(TEXT) - 1) // BLOCK * BLOCK
SLOT = 4 * 4 * 6 * 4 * 2
"""Bytes of a block of `SmallEngine`, kind "full"."""


def stored_prompts(tmp_path, number, **options):
    """Return an engine with tiers on disk that has computed prompts, and one prompt's slots."""
    engine = SmallEngine([disk(tmp_path)])
    texts = [[first, *TEXT[1:]] for first in range(101, 101 + number)]
    for text in texts:
        engine.run(text)
    engine.close()
    return SmallEngine([disk(tmp_path)], **options), texts


def served(engine, texts, seats=4):
    """Ask for all prompts at once, `seats` of which may run in a step; return the hit of each."""
    asked = {str(number): text for number, text in enumerate(texts)}
    for name, text in asked.items():
        engine.side.follow(name, text, Scope())
    hits, until = {}, time.monotonic() + 20
    while len(hits) < len(texts):
        scheduled, blocks = {}, {}
        for name, text in asked.items():
            if name in hits or len(scheduled) == seats:
                continue
            num = engine.side.matched(name, len(text), 0)
            if num is not None:
                hits[name] = num
                blocks[name] = [[next(engine._free) for _ in range(8)]]
                engine.side.allocated(name, blocks[name], num)
                scheduled[name] = num, len(text) - num
        copies = engine.side.step(scheduled, asked.get, blocks.get)
        if copies is not None:
            engine.workers[0].load(copies)
            for name in scheduled:
                engine.holds(asked[name], blocks[name], hits[name])
            engine.side.done(copies.step, 1, 0.0)
        for name in scheduled:
            engine.side.ended(name)
        assert time.monotonic() < until
    return [hits[name] for name in asked]


def test_a_burst_of_hits_is_loaded_as_room_comes(tmp_path):
    engine, texts = stored_prompts(tmp_path, 16, arena_bytes=4 * 7 * SLOT)
    assert served(engine, texts) == [WHOLE] * 16
    counts = engine.side.take_counts()
    assert (counts["loaded_requests"], counts.get("cut_blocks")) == (16, None)
    engine.close()


def waiting_for_room(tmp_path, now):
    """Return an engine where "holder" has seven of ten slots and "waiter" waits for them, and the waiter's text."""
    engine, (holder, waiter) = stored_prompts(
        tmp_path, 2, arena_bytes=10 * SLOT, settings=StackSettings(busy_share=1.0),
        now=lambda: now[0],
    )  # fmt: skip
    for _ in range(3):  # 29 tokens take 29 s
        engine.side._cost.observe(0, 29, 29.0)
    engine.side.follow("holder", holder, Scope())
    assert engine.loaded("holder", holder) == WHOLE
    engine.side.follow("waiter", waiter, Scope())
    until = time.monotonic() + 20
    while not engine.side._loading._waiting:
        assert engine.side.matched("waiter", len(waiter), 0) is None
        assert time.monotonic() < until
    return engine, waiter


def test_a_hit_waits_for_room_as_long_as_the_gate_allows_and_then_takes_what_there_is(tmp_path):
    now = [0.0]
    engine, waiter = waiting_for_room(tmp_path, now)
    now[0] += 0.2 * WHOLE
    assert engine.side.matched("waiter", len(waiter), 0) is None
    now[0] += 0.1 * WHOLE
    assert engine.loaded("waiter", waiter) == 3 * BLOCK, "ten slots less seven"
    engine.side.step({"waiter": (0, 1)}, lambda _: waiter, lambda _: [list(range(1, 9))])
    assert engine.side.counts["cut_blocks"] == 4
    for name in ("holder", "waiter"):
        engine.side.ended(name)
    engine.close()


def test_a_hit_that_waited_for_a_seat_is_loaded_whole_when_there_is_room(tmp_path):
    now = [0.0]
    engine, waiter = waiting_for_room(tmp_path, now)
    now[0] += 10 * WHOLE  # vLLM is full, and asks for nobody
    waiting = engine.side._loading._waiting[0]
    engine.side.ended("holder")
    assert engine.side._loading._cut(waiting) == waiting, "slots came back meanwhile"
    assert engine.loaded("waiter", waiter) == WHOLE
    engine.side.ended("waiter")
    assert not engine.side.take_counts().get("failed_blocks")
    engine.close()


def test_slots_of_loads_that_fail_or_had_not_begun_when_names_changed_are_given_back(tmp_path):
    engine, texts = stored_prompts(tmp_path, 6)
    engine.stack.load = None
    assert engine.run(texts[0])[0] == 0
    engine.side._arena.check()
    loading, all_asked, may_load = engine.side._loading, threading.Event(), threading.Event()
    search, free = loading._searched, engine.side._arena.num_free

    def searched(load):
        all_asked.wait(20)
        return search(load)

    def load(keys, *_, **__):
        may_load.wait(20)
        return [Outcome.ABSENT] * len(keys), [None] * len(keys)

    loading._searched, engine.stack.load = searched, load
    for name, text in enumerate(texts):
        engine.side.follow(str(name), text, Scope())
        assert engine.side.matched(str(name), len(text), 0) is None
    all_asked.set()
    until = time.monotonic() + 20
    while engine.side._arena.num_free > free - 6 * 7:
        assert time.monotonic() < until
    engine.side.rename(engine.parts)
    may_load.set()
    while engine.side._arena.num_free < free:
        assert time.monotonic() < until
        time.sleep(0.001)
    del engine.stack.load
    for name in range(6):
        engine.side.ended(str(name))
    engine.close()


def test_without_a_gate_a_hit_waits_as_long_as_others_get_room(tmp_path):
    now = [0.0]
    engine, texts = stored_prompts(tmp_path, 3, arena_bytes=7 * SLOT, now=lambda: now[0])
    for name, text in zip("abc", texts, strict=True):
        engine.side.follow(name, text, Scope())
        assert engine.side.matched(name, len(text), 0) is None
    waiting, until = deque(zip("abc", texts, strict=True)), time.monotonic() + 20
    while waiting:  # any of them may be found first, and gets the room
        name, text = waiting[0]
        if (num := engine.side.matched(name, len(text), 0)) is None:
            assert time.monotonic() < until
            engine.side.step({}, None, None)
            waiting.rotate()
            continue
        assert num == WHOLE
        engine.side.ended(name)
        waiting.popleft()
        now[0] += 0.9 * engine.side._loading.deadline_s
    assert "late" not in engine.side.counts
    engine.close()


def test_hits_that_the_gate_refuses_are_counted(tmp_path):
    engine, texts = stored_prompts(tmp_path, 1, settings=StackSettings(busy_share=1.0))
    for _ in range(3):
        engine.side._cost.observe(0, 29, 1e-6)
    engine.side.stack.gate.choose = lambda found, *_: Choice(0, len(found), (0,))
    assert engine.run(texts[0])[0] == 0
    assert engine.side.take_counts()["refused_blocks"] == WHOLE // BLOCK
    engine.close()


def test_blocks_on_a_disk_below_small_memory_are_not_copied_out_again(tmp_path):
    engine = SmallEngine([Host("8KiB"), disk(tmp_path)])
    texts = [[first, *TEXT[1:]] for first in range(101, 109)]
    for text in texts:
        engine.run(text)
    engine.settle()
    engine.side.take_counts()
    assert [engine.run(text)[0] for text in texts] == [WHOLE] * 8
    for text in texts:  # vLLM's own pool has it
        engine.side.follow("r", text, Scope())
        copies = engine.side.step(
            {"r": (WHOLE, 2)}, lambda _, text=text: text, lambda _: [list(range(1, 9))]
        )
        engine.side.done(copies.step, 1, 0.0)
        engine.side.ended("r")
    assert "saved_blocks" not in engine.side.take_counts()
    engine.close()


def test_blocks_of_a_request_that_stores_nothing_are_loaded_and_not_copied_out(tmp_path):
    engine, texts = stored_prompts(tmp_path, 1)
    for text, hit in ((texts[0], WHOLE), ([9, *texts[0]], 0)):
        engine.side.follow("r", text, Scope(), stores=False)
        assert engine.loaded("r", text) == hit
        copies = engine.side.step({"r": (0, 28)}, lambda _, text=text: text, lambda _: [[1] * 8])
        assert copies.saves == []
        engine.side.done(copies.step, 1, 0.0)
        engine.side.ended("r")
    engine.close()


def test_a_rank_stands_in_lines_and_tables():
    table = {"kind": "disk", "path": "/kv/{rank}", "capacity": 1}
    assert ranked(["host:1MiB", "disk:/kv/{rank}?capacity=1GiB", table], "3") == [
        "host:1MiB",
        "disk:/kv/3?capacity=1GiB",
        {"kind": "disk", "path": "/kv/3", "capacity": 1},
    ]


def config(max_model_len=100, max_num_seqs=2):
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
    )


def test_staging_is_sized_by_prompt_and_seats_and_warns_where_a_prompt_does_not_fit_twice(
    tmp_path, caplog
):
    engine = SmallEngine([Host("1MiB"), disk(tmp_path)])
    usual = StagingSize(engine.parts, config())
    assert (usual.prompt_bytes, usual.num_bytes) == (25 * SLOT, 2 * 2 * 25 * SLOT)
    assert StagingSize(engine.parts, config(max_num_seqs=64)).num_bytes == 2 * 4 * 25 * SLOT
    with caplog.at_level("INFO", "vllm.quire"):
        usual.say(engine.stack)
        assert "host 5,461 tokens" in caplog.text
        assert "cut" not in caplog.text
        StagingSize(engine.parts, config(), 30 * SLOT).say(engine.stack)
        assert "holds 120 tokens, and a prompt has up to 100" in caplog.text
    with pytest.raises(ConfigError, match="size"):
        StagingSize(engine.parts, config(), "much")
    engine.close()


def test_figures_of_tiers_are_given_without_doing_what_waits_to_be_stored():
    engine = SmallEngine([Host("1MiB")], settings=StackSettings(gate=False))
    ran = []
    engine.side.arrived("r")
    assert engine.stack.feeding.has_room(1 << 20)
    engine.stack.feeding.begin([bytes(32)], lambda: ran.append(1), 1)
    assert engine.side.take_figures()["host"]["records"] == 0
    assert not ran
    engine.side.ended("r")
    engine.close()
    assert ran


def test_figures_of_tiers_are_counts_since_the_last_time_and_states_now(tmp_path):
    now = [0.0]
    engine, (text,) = stored_prompts(tmp_path, 1, now=lambda: now[0])
    first = engine.side.take_figures()["disk"]
    assert (first["hits"], first["records"], first["in_service"]) == (0, WHOLE // BLOCK, 1)
    assert engine.run(text)[0] == WHOLE
    assert engine.side.take_figures() == {}, "within a second"
    now[0] += 1
    second = engine.side.take_figures()["disk"]
    assert (second["hits"], second["misses"]) == (WHOLE // BLOCK, 0)
    assert second["loaded_bytes"] > WHOLE // BLOCK * SLOT
    assert second.keys() == {*COUNTS, *STATES}
    engine.stack._levels[0].reading.open()
    now[0] += 1
    third = engine.side.take_figures()["disk"]
    assert (third["hits"], third["in_service"]) == (0, 0)
    engine.close()
