"""quire's secondary tier under vLLM's own offloading classes, in the environment that has them; prints the checks that held.

PYTHONPATH=src:tests .venv-vllm/bin/python tests/behind_vllm/tier_run.py
"""

import time
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from peer_checks import run_checks
from quire.errors import ConfigError

PAGE = 4096
CHUNKS = 8
ALONE = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
NOT_FULL = {"close_timeout_s": 60, "load_timeout_s": 20, "lookup_timeout_s": 20}


def config_of(tier, events=False, **facts):
    """Return vLLM's own description of an engine with one worker and this secondary tier."""
    model = facts.pop("model", "some/model")
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("a", "b"), group_id=0),),
        worker_kv_bytes_per_block=PAGE,
        enable_kv_cache_events=events,
        extra_config={"cpu_bytes_to_use": PAGE * CHUNKS, "secondary_tiers": [tier]},
        engine_id=f"quire-test-{uuid4().hex}",
        model=OffloadingModelConfig(name=model, dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=facts.pop("index", 0),
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
        kv_cache_layout=facts.pop("layout", "NHD"),
    )


def tier_of(*lines, weights="one", **more):
    settings = more.pop("settings", {}) | NOT_FULL
    return {
        "type": "QuireTier",
        "module_path": "quire.engines.vllm",
        "tiers": [str(each) for each in lines],
        "weights": weights,
        "settings": settings,
    } | more


class Engine:
    """vLLM's tiering manager, and the part of its scheduler that calls it."""

    def __init__(self, config):
        self.spec = TieringOffloadingSpec(config)
        self.manager = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self.view = self.manager.primary_tier.get_kv_memoryview()
        self.size = self.view.strides[0]
        self.number = 0

    def request(self):
        self.number += 1
        context = ReqContext(req_id=f"r{self.number}")
        self.manager.on_new_request(context)
        return context

    def chunk(self, at):
        return np.frombuffer(self.view.cast("B"), np.uint8, self.size, int(at) * self.size)

    def offload(self, keys, fills):
        """Have chunks copied to host memory, as from a GPU, and stored from there."""
        context = self.request()
        prepared = self.manager.prepare_store(keys, context)
        places = dict(zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True))
        for key, fill in zip(keys, fills, strict=True):
            self.chunk(places[key])[:] = fill
        self.manager.complete_store(keys, context)
        self.manager.on_request_finished(context)
        self.settle()

    def step(self):
        self.manager.on_schedule_end(ALONE)

    def settle(self):
        until = time.monotonic() + 20
        self.step()
        while self.manager.has_pending_work():
            assert time.monotonic() < until
            self.step()
            time.sleep(0.001)

    def ask(self, keys):
        """Look chunks up until each is there or is not, as a waiting request; return their bytes or None."""
        context, found = self.request(), []
        for key in keys:
            until = time.monotonic() + 20
            while (result := self.manager.lookup(key, context)) in (
                LookupResult.RETRY,
                LookupResult.HIT_PENDING,
            ):
                assert time.monotonic() < until, result
                self.step()
                time.sleep(0.001)
            if result is LookupResult.MISS:
                found.append(None)
                continue
            spec = self.manager.prepare_load([key], context)
            found.append(bytes(self.chunk(spec.chunk_ids[0])))
            self.manager.complete_load([key], context)
        self.manager.on_request_finished(context)
        self.step()
        return found

    def reset(self):
        self.manager.reset_cache()
        if hasattr(
            self.manager, "on_reset_flushed"
        ):  # from 0.33 on, until workers have ended their jobs
            self.manager.on_reset_flushed()

    def written(self):
        self.tier._stack.open_stack.drain(20)


@contextmanager
def engine(*lines, events=False, **more):
    facts = {name: more.pop(name) for name in ("model", "layout", "index") if name in more}
    made = Engine(config_of(tier_of(*lines, **more), events, **facts))
    try:
        yield made
    finally:
        made.manager.shutdown()
        assert not Path(made.spec._scheduler_mmap.mmap_path).exists()


def refusal(tier):
    """Return the error with which an engine with this tier does not start."""
    try:
        Engine(config_of(tier))
    except ConfigError as error:
        return str(error)
    raise AssertionError(tier)


def keys_of(count, first=0, group=0):
    return [make_offload_key(bytes([first + at]) * 32, group) for at in range(count)]


def disk(place, size="16MiB"):
    return f"disk:{place}?capacity={size}"


def check_chunks_outlive_the_engine_and_come_back_as_they_were(place):
    keys = keys_of(5)
    with engine(disk(place)) as one:
        assert one.ask(keys) == [None] * 5
        one.offload(keys, range(1, 6))
    with engine(disk(place)) as other:
        assert other.ask([*keys, *keys_of(2, 50)]) == [
            *[bytes([fill]) * other.size for fill in range(1, 6)],
            None,
            None,
        ]


def check_chunks_that_host_memory_has_no_room_for_come_from_the_tier(place):
    with engine(disk(place), "host:1MiB") as one:
        for at in range(4 * CHUNKS):
            one.offload(keys_of(1, at), [at + 1])
        one.written()
        for at in range(4 * CHUNKS):
            assert one.ask(keys_of(1, at)) == [bytes([at + 1]) * one.size], at


def check_other_weights_layouts_and_groups_are_other_chunks(place):
    shared = f"files:{place}"
    with engine(shared) as one:
        one.offload(keys_of(2), [7, 8])
        one.written()
        with engine(shared) as same:
            assert None not in same.ask(keys_of(2))
        with engine(shared, weights="two") as other:
            assert other.ask(keys_of(2)) == [None, None]
        with engine(shared, layout="HND") as other:
            assert other.ask([*keys_of(2), *keys_of(1, group=1)]) == [None] * 3


def check_weights_of_a_folder_are_its_contents(place):
    shared = f"files:{place / 'kv'}"
    for name, weights in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (place / name).mkdir()
        (place / name / "model.safetensors").write_bytes(weights)
    with engine(shared, model=str(place / "a"), weights=None) as one:
        one.offload(keys_of(1), [9])
        one.written()
        with engine(shared, model=str(place / "b"), weights=None) as other:
            assert None not in other.ask(keys_of(1))
        with engine(shared, model=str(place / "c"), weights=None) as other:
            assert other.ask(keys_of(1)) == [None]
    assert "no folder" in refusal(tier_of(shared, weights=None))


def check_a_damaged_chunk_is_a_miss_once_and_for_all(place):
    keys = keys_of(3)
    with engine(f"files:{place}") as one:
        one.offload(keys, [1, 2, 3])
        one.written()
    records = [each for each in place.rglob("*") if each.is_file() and each.stat().st_size > PAGE]
    assert len(records) == 3
    for record in records[:1]:
        held = bytearray(record.read_bytes())
        held[-100] ^= 1
        record.write_bytes(held)
    with engine(f"files:{place}") as other:
        came = other.ask(keys)
        assert sorted(came, key=str).count(None) == 1
        assert all(
            each is None or each == bytes([at + 1]) * other.size for at, each in enumerate(came)
        )
        damaged = keys[came.index(None)]
        assert other.ask([damaged]) == [None]
        other.offload([damaged], [came.index(None) + 1])
        other.written()


def check_a_tier_that_is_down_or_hangs_ends_every_job(place):
    settings = {"load_timeout_s": 0.3, "lookup_timeout_s": 0.1}
    down = tier_of("redis://127.0.0.1:1", settings=settings)
    down["settings"] |= settings
    dead = Engine(config_of(down))
    dead.offload(keys_of(2), [1, 2])
    assert dead.ask(keys_of(2, 10)) == [None, None]
    dead.manager.shutdown()
    with engine(disk(place)) as one:
        one.offload(keys_of(2), [1, 2])
        one.written()
        stack = one.tier._stack.open_stack
        load = stack.load

        def hang(*given, **words):
            time.sleep(0.5)
            return load(*given, **words)

        def fail(*given, **words):
            raise RuntimeError("a bug")

        one.manager.primary_tier.reset_cache()
        for broken, wanted in ((hang, [bytes([1]) * one.size]), (fail, [None])):
            stack.load = broken
            assert one.ask(keys_of(1, 0 if broken is hang else 1)) == wanted
        assert one.manager.get_stats() is not None
        one.reset()


def check_draining_waits_for_jobs_and_a_reset_keeps_what_is_stored(place):
    with engine(disk(place)) as one:
        context = one.request()
        prepared = one.manager.prepare_store(keys_of(4), context)
        for at, chunk in enumerate(prepared.store_spec.chunk_ids):
            one.chunk(chunk)[:] = at + 1
        one.manager.complete_store(keys_of(4), context)
        one.manager.on_request_finished(context)
        one.reset()
        assert not one.manager.has_pending_work()
        one.written()
        assert one.ask(keys_of(4)) == [bytes([at + 1]) * one.size for at in range(4)]


def check_events_tell_each_residency_and_its_end(place):
    room = disk(place, "128KiB")  # of about 20 chunks
    with engine(room, events=True, enable_kv_events=True, locality="LOCAL") as one:
        held, removed = set(), 0
        for at in range(60):
            one.offload(keys_of(1, at), [at])
            one.written()
            one.step()
            for event in one.tier.take_events():
                assert (event.medium.value, event.ownership) == ("STORAGE", "QuireTier")
                assert (event.locality.value, event.removal_expected) == ("LOCAL", True)
                if event.removed:
                    removed += len(event.keys)
                    held -= set(event.keys)
                else:
                    assert not held & set(event.keys)
                    held |= set(event.keys)
        assert removed > 20
        one.manager.primary_tier.reset_cache()
        there = {key for at in range(60) for key in keys_of(1, at) if one.ask([key]) != [None]}
        assert there == held
        assert len(held) > 5
        assert list(one.tier.take_events()) == []  # loads of what was told
    with engine(room, events=True, enable_kv_events=True) as after:
        key = next(iter(held))
        assert list(after.tier.take_events()) == []
        assert after.ask([key]) != [None]
        assert [event.keys for event in after.tier.take_events()] == [[key]]


def check_events_are_silent_where_nobody_publishes_them(place):
    for published, wished in ((True, False), (False, True)):
        with engine(disk(place / f"{published}"), events=published, enable_kv_events=wished) as one:
            one.offload(keys_of(2), [1, 2])
            assert list(one.tier.take_events()) == []


def check_figures_of_each_tier_are_exported(place):
    definitions = TieringOffloadingSpec.build_metric_definitions(
        config_of(tier_of(disk(place))).extra_config
    )
    with engine(disk(place)) as one:
        one.offload(keys_of(2), [1, 2])
        one.written()
        one.tier._figures._asked_s = -1e9
        told = one.tier.get_stats().reduce()
    named = {name.partition(":(")[0] for name in told}
    assert named <= set(definitions), named - set(definitions)
    assert told["vllm:kv_offload_quire_in_service:('disk',)"] == 1
    assert told["vllm:kv_offload_quire_stored_bytes:('disk',)"] > 2 * PAGE


def check_names_that_could_collide_are_not_kept(place):
    short = [make_offload_key(bytes([1]) * 16, 0)]
    with engine(disk(place)) as one:
        one.offload(short, [1])
        one.manager.primary_tier.reset_cache()
        assert one.ask(short) == [None]


def check_a_second_engine_on_one_directory_runs_without_it(place):
    with engine(disk(place)) as one, engine(disk(place)) as other:
        one.offload(keys_of(1), [1])
        other.offload(keys_of(1), [1])
        other.manager.primary_tier.reset_cache()
        assert other.ask(keys_of(1)) == [None]
        with engine(disk(place / "{rank}"), index=1) as third:
            third.offload(keys_of(1), [1])
        assert (place / "1").is_dir()


def check_unknown_options_are_refused(place):
    for wrong in (tier_of(disk(place), root_dir="x"), tier_of()):
        assert "secondary tier QuireTier" in refusal(wrong)


if __name__ == "__main__":
    run_checks(globals())
