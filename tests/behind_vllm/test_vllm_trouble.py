"""Faults around a real vLLM with the connector: `make test-vllm`. Minutes; each engine takes half a one to start."""

import os
import signal
import sys
from pathlib import Path

import pytest
from vllm_help import NEEDS_VLLM, differ, ended, extra, options, run, started, whole

from quire import demo_model

sys.path.append(str(Path(__file__).parents[1] / "tiers"))

from file_systems import fill, mounted
from servers import running

pytestmark = NEEDS_VLLM

LOAD = {"seed": 5, "conversations": 20, "turns": 3, "max_tokens": 16, "repeat": 0}
SMALL_POOL = {"num_gpu_blocks_override": 70, "max_num_seqs": 2}
"""It holds one prompt of the longest, and not the conversations: their second turn needs the tiers."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The answers of vLLM without a connector."""
    return run(tmp_path_factory.mktemp("plain"), demo_model(), LOAD, SMALL_POOL)[0]


def is_same(plain, others):
    return differ(plain, others) == (0, 0)


def all_cached(requests):
    """Return whether each request of the first turn found its whole prompt."""
    return all(each["cached"] == whole(each) for each in requests[:20])


@pytest.mark.system("redis-server")
def test_what_one_process_computed_comes_to_another_through_redis(tmp_path, plain):
    with running(tmp_path) as server:
        tier = options(server.url)
        first, _ = run(tmp_path, demo_model(), LOAD, SMALL_POOL, tier)
        other, told = run(tmp_path, demo_model(), LOAD, SMALL_POOL, tier)
    assert is_same(plain, first)
    assert is_same(plain, other)
    assert not all_cached(first)
    assert all_cached(other)
    assert told["counts"]["vllm:quire_failed_blocks"] == 0


def test_on_a_full_disk_all_is_served_and_one_warning_says_so(tmp_path, plain):
    with mounted(tmp_path, "tmpfs") as system:
        fill(system)
        tiers = options("host:64MiB", f"disk:{system / 'kv'}?capacity=1GiB")
        full, told = run(tmp_path, demo_model(), LOAD, SMALL_POOL, tiers)
    assert is_same(plain, full)
    assert told["said"].count("no room left") == 1
    assert told["counts"]["vllm:quire_loaded_tokens"] > 0  # from host memory


def test_an_engine_killed_while_it_stores_leaves_what_it_had_and_a_second_beside_it_ran_without(
    tmp_path, plain
):
    job = {"model": str(demo_model()), "engine": SMALL_POOL, "extra": extra(tmp_path / "kv")}
    with started(tmp_path, "vllm_run.py", job | LOAD | {"rounds": 10_000}, "killed") as begun:
        storing = begun[0]
        assert "round 1\n" in storing.stdout, begun[2].read_text()[-5000:]
        with started(tmp_path, "vllm_run.py", job | LOAD, "second") as second:
            told, said = ended(*second)
        assert "runs without one of its tiers" in said
        assert is_same(plain, told["requests"])
        assert not all_cached(told["requests"])
        assert storing.poll() is None
        os.killpg(storing.pid, signal.SIGKILL)
    again, _ = run(tmp_path, demo_model(), LOAD, SMALL_POOL, job["extra"])
    assert is_same(plain, again)
    assert all_cached(again)


def test_two_workers_find_again_what_they_stored_and_so_does_one(tmp_path, plain):
    two, tiers = SMALL_POOL | {"tensor_parallel_size": 2}, extra(tmp_path / "kv")
    first, _ = run(tmp_path, demo_model(), LOAD, two, tiers)
    assert not all_cached(first)
    for workers in (two, SMALL_POOL):
        again, told = run(tmp_path, demo_model(), LOAD, workers, tiers)
        assert all_cached(again)
        assert told["counts"]["vllm:quire_failed_blocks"] == 0
        # Two workers add up their halves in another order: what is nearly equal may change places.
        assert [differ(plain, each)[0] for each in (first, again)] == [0, 0]


@pytest.mark.parametrize("other", [{"block_size": 64}, {"dtype": "bfloat16"}])
def test_blocks_of_another_size_or_type_are_not_found_in_the_same_store(tmp_path, other):
    few, tiers = LOAD | {"conversations": 3, "turns": 1}, extra(tmp_path / "kv")
    run(tmp_path, demo_model(), few, None, tiers)
    _, told = run(tmp_path, demo_model(), few, other, tiers)
    assert told["counts"]["vllm:quire_loaded_tokens"] == 0
    assert told["counts"]["vllm:quire_saved_blocks"] > 0
    _, told = run(tmp_path, demo_model(), few, other, tiers)
    assert told["counts"]["vllm:quire_loaded_tokens"] > 0


def test_an_adapter_loaded_anew_under_its_old_name_finds_only_what_its_weights_computed(tmp_path):
    job = {"model": str(demo_model()), "extra": extra(tmp_path / "kv")}
    job["adapter"] = str(tmp_path / "adapter")

    def asked(*steps):
        with started(tmp_path, "vllm_lora.py", job | {"steps": steps}) as begun:
            told, _ = ended(*begun)
        return [each["tokens"] for each in told], [each["cached"] for each in told]

    (one, same, kept, two, also_two), cached = asked((1, 0), (1, 0), (2, 0), (2, 1), (2, 1))
    assert one == same == kept != two == also_two
    assert cached == [0, 192, 0, 0, 192]
    texts, cached = asked((2, 0), (1, 1))  # by another engine
    assert texts == [two, one]
    assert cached == [192, 192]
