"""The scheduler's and the workers' side of the connector, with real tiers and without vLLM."""

import threading
import time

import pytest
import torch
from sides_help import BLOCK, SmallEngine

from quire.core import MediaItem, Scope
from quire.engines.tiered.opening import open_free
from quire.engines.vllm.arena import SharedArena
from quire.engines.vllm.copying import WorkerSide
from quire.engines.vllm.parts import make_parts
from quire.engines.vllm.scheduling import Copy, StepCopies
from quire.errors import ConfigError
from quire.exchange.hashing import block_hashes
from quire.tiers import Disk, FaultPlan, Faulty, Host, StackSettings

TEXT = [(7 * at) % 50 + 1 for at in range(30)]
WHOLE = (len(TEXT) - 1) // BLOCK * BLOCK


def disk(tmp_path):
    return Disk(tmp_path / "kv", "16MiB")


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_a_new_engine_finds_on_disk_what_the_last_one_computed(tmp_path, kind):
    first = SmallEngine([Host("4MiB"), disk(tmp_path)], kind)
    assert first.run(TEXT)[0] == 0
    first.close()
    again = SmallEngine([Host("4MiB"), disk(tmp_path)], kind)
    num, blocks = again.run([*TEXT[:25], 99, 98, 97])
    assert num == 24
    again.holds(TEXT[:24], blocks)
    again.side._arena.check()
    again.close()


def test_records_do_not_say_how_many_workers_there_were(tmp_path):
    for num_workers in (2, 1, 4):
        engine = SmallEngine([disk(tmp_path)], "hybrid", num_workers)
        num, blocks = engine.run(TEXT)
        assert num == (0 if num_workers == 2 else WHOLE)
        engine.holds(TEXT, blocks, num)
        engine.close()


def test_other_models_salts_adapters_and_media_find_nothing(tmp_path):
    engine = SmallEngine([Host("4MiB"), disk(tmp_path)])
    image = MediaItem(b"i" * 32, 2, 3)
    engine.run(TEXT)
    engine.settle()
    assert engine.run(TEXT)[0] == WHOLE
    assert engine.run(TEXT, Scope(salt="a"))[0] == 0
    assert engine.run(TEXT, Scope(lora="a"))[0] == 0
    assert engine.run(TEXT, media=[image])[0] == 0
    engine.settle()
    assert engine.run(TEXT, media=[image])[0] == WHOLE
    assert engine.run(TEXT, media=[MediaItem(b"j" * 32, 2, 3)])[0] == 0
    engine.close()
    other = SmallEngine([disk(tmp_path)], model="other weights")
    assert other.run(TEXT)[0] == 0
    other.close()


def test_a_window_that_is_not_whole_lowers_the_hit(tmp_path):
    engine = SmallEngine([disk(tmp_path)], "hybrid")
    engine.run(TEXT)
    engine.settle()
    digests = block_hashes(TEXT, BLOCK)
    engine.stack.delete(
        [engine.parts[1].key(digests[5])]
    )  # blocks 5 and 6 are what a hit of 7 reads
    num, blocks = engine.run(TEXT)
    assert num == 5 * BLOCK
    engine.holds(TEXT, blocks, num)
    engine.close()


def test_what_a_window_has_left_behind_is_not_stored_again(tmp_path):
    engine = SmallEngine([disk(tmp_path)], "hybrid")
    engine.run(TEXT)
    engine.settle()
    gone = [engine.parts[1].key(each) for each in block_hashes(TEXT, BLOCK)[:4]]
    engine.stack.delete(gone)
    assert engine.run(TEXT)[0] == WHOLE
    engine.settle()
    assert engine.stack.tiers[0].contains(gone) == [False] * 4
    engine.close()


def test_behind_a_gap_nothing_of_a_request_is_stored(tmp_path):
    engine = SmallEngine([disk(tmp_path)], arena_bytes=4 * 1024)
    ids = [list(range(1, 9))]
    engine.side.follow("r", TEXT, Scope())
    assert engine.loaded("r", TEXT) == 0

    def saved(start, count):
        copies = engine.side.step({"r": (start, count)}, lambda _: TEXT, lambda _: ids)
        return copies.step, [each.block for each in copies.saves]

    first, blocks = saved(0, 16)
    assert blocks == [1, 2, 3, 4]
    assert saved(16, 8)[1] == [5]  # there are five slots
    engine.side.done(first, 1, 0.0)
    engine.settle()
    assert engine.side._arena.num_free == 4
    assert saved(24, 4)[1] == []
    engine.side.ended("r")
    engine.side.close()


def test_what_waited_while_requests_ran_is_stored_when_the_last_one_has_ended(tmp_path):
    engine = SmallEngine([disk(tmp_path)], settings=StackSettings(gate=False, busy_share=1e-9))
    ids = [list(range(1, 9))]
    keys = [engine.parts[0].key(each) for each in block_hashes(TEXT, BLOCK)[:6]]
    engine.side.follow("r", TEXT, Scope())
    assert engine.loaded("r", TEXT) == 0
    for start in range(0, 24, 8):
        copies = engine.side.step({"r": (start, 8)}, lambda _: TEXT, lambda _: ids)
        engine.side.done(copies.step, 1, 0.0)
    engine.side.ended("r")
    until = time.monotonic() + 20
    while not all(engine.stack.tiers[0].contains(keys)):
        assert time.monotonic() < until
        time.sleep(0.01)
    engine.close()


def test_workers_hear_of_the_steps_that_copy_or_compute_a_prompt(tmp_path):
    engine = SmallEngine([disk(tmp_path)])
    engine.side.follow("r", TEXT, Scope())
    assert engine.loaded("r", TEXT) == 0

    def asked(start, count):
        return engine.side.step(
            {"r": (start, count)}, lambda _: TEXT, lambda _: [list(range(1, 9))]
        )

    steps = [asked(0, 2), asked(2, 1), asked(3, 1), asked(4, 1)]
    assert [step is None for step in steps] == [False, True, False, True]
    assert not steps[0].saves
    assert [each.block for each in steps[2].saves] == [1]
    for step in (steps[0], steps[2]):
        engine.side.done(step.step, 1, 0.0)
    engine.side.ended("r")
    engine.close()


def test_hits_whose_forwards_other_work_made_slow_do_not_end_loading(tmp_path):
    engine = SmallEngine([Host("4MiB"), disk(tmp_path)], settings=StackSettings(busy_share=1.0))

    def asked(first, took=lambda num_tokens: 0.006 * num_tokens):
        return engine.run([first, *TEXT], took=took)[0]

    for first in range(1, 9):
        assert asked(first) == 0
    engine.settle()
    assert [asked(first, lambda _: 0.8) for first in range(1, 9)] == [WHOLE] * 8
    assert [asked(first) for first in range(1, 9)] == [WHOLE] * 8
    engine.close()


def test_a_prompt_that_no_tier_has_waits_for_nobody_where_that_is_known_at_once(tmp_path):
    engine = SmallEngine([Host("4MiB"), disk(tmp_path)])
    engine.side.follow("cold", TEXT, Scope())
    assert engine.side.matched("cold", len(TEXT), 0) == 0
    engine.run(TEXT)
    engine.settle()
    assert engine.loaded("cold", TEXT) == WHOLE, "it is there by now"
    engine.side.follow("behind", [*TEXT[:8], *TEXT], Scope())
    assert engine.side.matched("behind", len(TEXT) + 8, 2 * BLOCK) == 0
    for name in ("cold", "behind"):
        engine.side.ended(name)
    engine.close()
    unsure = SmallEngine([Faulty(disk(tmp_path), FaultPlan(hangs=1.0, hang_s=0.2))])
    unsure.side.follow("cold", [99, *TEXT], Scope())
    assert unsure.side.matched("cold", len(TEXT), 0) is None
    unsure.side.ended("cold")
    unsure.stack.drain(10)
    unsure.side.close()


def test_what_vllm_has_itself_is_not_loaded(tmp_path):
    engine = SmallEngine([disk(tmp_path)])
    engine.run(TEXT)
    engine.settle()
    engine.side.follow("r", TEXT, Scope())
    assert engine.loaded("r", TEXT) == WHOLE
    assert engine.side.matched("r", len(TEXT), 3 * BLOCK) == WHOLE - 3 * BLOCK
    blocks = [list(range(8))]
    engine.side.allocated("r", blocks, WHOLE - 3 * BLOCK)
    copies = engine.side.step({"r": (WHOLE, 2)}, lambda _: TEXT, lambda _: blocks)
    assert sorted(each.block for each in copies.loads) == [3, 4, 5, 6]
    engine.side.done(copies.step, 1, 0.0)
    engine.side.ended("r")
    engine.side._arena.check()
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_kernels_with_smaller_blocks_and_any_dtype_give_what_they_were_given(dtype):
    values = torch.arange(6 * 2 * 2 * 8) % 100
    cache = values.view(6, 2, 2, 8).to(dtype)  # three blocks, each two of the kernel's
    given = cache.clone()
    worker = WorkerSide({"a": cache}, [(("a",), 0, "plain")], 3)
    part = make_parts([worker.shapes], "m", 4)[0]
    arena = SharedArena(part.payload_bytes, 1 << 12)
    worker.save(StepCopies(1, arena.place, [], [Copy(0, 0, 4), Copy(0, 2, 1)]))
    cache.copy_(torch.zeros(cache.shape))
    worker.load(StepCopies(2, arena.place, [Copy(0, 2, 4), Copy(0, 0, 1)], []))
    assert torch.equal(cache[4:].float(), given[:2].float())
    assert torch.equal(cache[:2].float(), given[4:].float())
    assert not cache[2:4].float().any()


@pytest.mark.parametrize("shape", [(3, 2, 4), (7, 2, 4, 6)])
def test_caches_of_other_forms_are_refused(shape):
    with pytest.raises(ConfigError, match="has shape"):
        WorkerSide({"a": torch.zeros(shape)}, [(("a",), 0, "plain")], 3)


def test_a_request_that_is_preempted_is_served_again(tmp_path):
    engine = SmallEngine([disk(tmp_path)])
    first = engine.side.step
    num, _ = engine.run(TEXT, name="r")
    assert num == 0
    engine.settle()
    engine.side.follow("r", TEXT, Scope())
    for _ in range(2):  # it is given blocks, and loses them before it ends
        assert engine.loaded("r", TEXT) == WHOLE
        engine.side.allocated("r", [list(range(1, 9))], WHOLE)
        copies = first({"r": (WHOLE, 2)}, lambda _: TEXT, lambda _: [list(range(1, 9))])
        assert len(copies.loads) == WHOLE // BLOCK
        engine.side.done(copies.step, 1, 0.0)
    engine.side.ended("r")
    engine.side._arena.check()
    engine.close()


@pytest.mark.parametrize(
    "plan",
    [
        FaultPlan(corruption=1.0),
        FaultPlan(errors=1.0),
        FaultPlan(short_reads=1.0),
        FaultPlan(hangs=1.0, hang_s=0.4),
    ],
)
def test_a_tier_that_lies_fails_or_hangs_costs_a_hit(tmp_path, plan):
    first = SmallEngine([disk(tmp_path)])
    first.run(TEXT)
    first.close()
    settings = StackSettings(busy_share=1.0, gate=False, load_timeout_s=0.2, lookup_timeout_s=0.1)
    engine = SmallEngine([Faulty(disk(tmp_path), plan)], settings=settings)
    for _ in range(3):
        num, blocks = engine.run(TEXT)
        engine.holds(TEXT, blocks, num)
        assert num < WHOLE
    engine.stack.drain(10)
    engine.side._arena.check()
    engine.side.close()


def test_a_tier_that_is_slow_to_say_and_slow_to_give_costs_half_of_computing_once(tmp_path):
    slow, now = Faulty(disk(tmp_path), FaultPlan()), [0.0]
    settings = StackSettings(busy_share=1.0)
    engine = SmallEngine([slow], settings=settings, now=lambda: now[0])
    for first in range(1, 4):
        engine.run([first, *TEXT], took=lambda num_tokens: 0.25 * num_tokens)
    engine.settle()
    lookup, load, given_up, saved_s = slow._contains, engine.stack.load, threading.Event(), []

    def contains(*asked):
        now[0] += 3.25  # of 7 s that 28 tokens take
        return lookup(*asked)

    def loaded(*asked, **how):
        saved_s.append(how["saved_s"])
        return load(*asked, **how)

    slow._contains, slow._get, engine.stack.load = contains, lambda *_: given_up.wait(60), loaded
    engine.side.follow("r", [1, *TEXT], Scope())
    assert engine.loaded("r", [1, *TEXT]) == 0
    given_up.set()
    (left_s,) = saved_s  # the tiers wait for half of it
    assert left_s == pytest.approx(7 - 2 * 3.25, abs=0.1)
    engine.side.ended("r")
    engine.side.close()


def test_a_load_that_is_late_is_given_up_and_its_slots_come_back(tmp_path):
    now = [0.0]
    engine = SmallEngine([disk(tmp_path)], now=lambda: now[0])
    engine.run(TEXT)
    engine.settle()
    loading = engine.side._loading
    began, loading._run = loading._run, lambda load: None  # no thread takes it
    engine.side.follow("r", TEXT, Scope())
    assert engine.side.matched("r", len(TEXT), 0) is None
    now[0] += loading.deadline_s
    assert engine.side.matched("r", len(TEXT), 0) == 0
    assert engine.side.take_counts()["late"] == 1
    began(engine.side._requests["r"].load)  # it comes after all
    engine.side._arena.check()
    engine.side.ended("r")
    engine.close()


def test_a_full_arena_stores_and_loads_the_head(tmp_path):
    small = SmallEngine([disk(tmp_path)], arena_bytes=3 * 1024)  # slots for three blocks
    assert small.side._arena.place.num_slots == 4
    small.run(TEXT)
    assert small.side.take_counts() == {"saved_blocks": 4, "passed_over_blocks": 3}
    small.settle()
    assert small.run(TEXT)[0] == 4 * BLOCK
    assert small.side.take_counts()["cut_blocks"] == len(TEXT) // BLOCK - 4
    small.close()


def test_traffic_that_comes_once_is_not_stored_where_a_second_use_is_asked_for(tmp_path):
    settings = StackSettings(busy_share=1.0, gate=False, write="second_use")
    engine = SmallEngine([disk(tmp_path)], settings=settings)
    assert [engine.run(TEXT)[0] for _ in range(2)] == [0, 0]
    engine.settle()
    assert engine.run(TEXT)[0] == WHOLE
    engine.run([3, *TEXT])
    engine.settle()
    assert engine.run([3, *TEXT])[0] == 0
    engine.close()


def test_after_a_reset_nothing_is_found_that_was_stored_before(tmp_path):
    engine = SmallEngine([disk(tmp_path)])
    engine.run(TEXT)
    engine.settle()
    assert engine.run(TEXT)[0] == WHOLE
    engine.side.follow("r", TEXT, Scope())
    engine.side.step({"r": (0, 8)}, lambda _: TEXT, lambda _: [list(range(1, 9))])
    engine.side.rename(make_parts([engine.workers[0].shapes], "new weights", BLOCK))
    copies = engine.side.step({"r": (8, 20)}, lambda _: TEXT, lambda _: [list(range(1, 9))])
    assert not copies.saves  # its first blocks are of the old weights
    assert engine.run(TEXT)[0] == 0
    engine.settle()
    assert engine.run(TEXT)[0] == WHOLE
    engine.close()


def test_a_second_engine_on_a_directory_runs_without_it_and_says_so(tmp_path, caplog):
    lines = ["host:1MiB", f"disk:{tmp_path / 'kv'}?capacity=16MiB"]
    with open_free(lines, {"busy_share": 1.0}) as first:
        assert len(first.tiers) == 2
        with open_free(lines, {}) as second:
            assert second.names == ("host",) or list(second.names) == ["host"]
        assert "runs without one of its tiers" in caplog.text
        assert open_free(lines[1:], {}) is None
    with pytest.raises(ConfigError, match="write"):
        open_free(lines, {"write": "never"})
    with open_free(lines, {}) as again:  # nothing was left open
        assert len(again.tiers) == 2
