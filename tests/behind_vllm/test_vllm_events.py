"""KV events of and for a real vLLM: `make test-vllm`. Minutes; the server takes most of one to start."""

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

pytest.importorskip("zmq", reason="install it with: pip install '.[observe]'")

from vllm_help import options
from vllm_lora import write_adapter

from quire import CacheManager, demo_model, ops
from quire.exchange import EventLog
from quire.observe import Mirror
from quire.observe.zmq import Publisher, Subscriber
from quire_router.prefixes import ToldPrefixes

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("QUIRE_VLLM", REPOSITORY / ".venv-vllm"))
NUM_REQUESTS = int(os.environ.get("QUIRE_VLLM_REQUESTS", "400"))
BLOCKS = 300
PARALLEL = 32

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (ENVIRONMENT / "bin/python").exists(),
        reason=f"no vLLM in {ENVIRONMENT}: `make test-vllm` installs it",
    ),
]


def free_ports(count):
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


@pytest.fixture
def server(tmp_path):
    """`vllm serve` with events: its URL, where they are published, and where it answers."""
    with serving(tmp_path) as places:
        yield places


@contextmanager
def serving(tmp_path, *more):
    port, events, replay = free_ports(3)
    told = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    words = [
        *("--model", demo_model(), "--served-model-name", "tiny", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
        *("--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", str(PARALLEL)),
        *("--enable-prompt-tokens-details", "--kv-events-config", json.dumps(told)),
        *more,
    ]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    log = (tmp_path / "vllm.log").open("w")
    running = subprocess.Popen(
        # `vllm serve` itself: its command looks for a distribution of another name than vllm-cpu.
        [ENVIRONMENT / "bin/python", "-m", "vllm.entrypoints.openai.api_server", *map(str, words)],
        env=environment | settings,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert running.poll() is None, (tmp_path / "vllm.log").read_text()[-5000:]
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        yield url, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"
    finally:
        running.terminate()
        running.wait(60)
        log.close()


def prompts(count):
    """Prompts of conversations whose turns continue each other, and that share their beginnings."""
    rng = random.Random(7)
    systems = [[rng.randrange(5, 250) for _ in range(64)] for _ in range(4)]
    talks = [list(rng.choice(systems)) for _ in range(20)]
    made = []
    for _ in range(count):
        at = rng.randrange(len(talks))
        if len(talks[at]) > 400:
            talks[at] = list(rng.choice(systems))
        talks[at] = talks[at] + [rng.randrange(5, 250) for _ in range(rng.randrange(5, 60))]
        made.append(talks[at])
    return made


async def ask(client, prompt, salt=None, max_tokens=4):
    """Return how many tokens of a prompt were cached."""
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = await client.post(
        "/v1/completions", json=asked | ({"cache_salt": salt} if salt else {})
    )
    details = answer.raise_for_status().json()["usage"]["prompt_tokens_details"]
    return (details or {}).get("cached_tokens") or 0


async def ask_all(client, asked, subscriber):
    """Ask everything, so many at a time, while the events are followed."""
    waiting = iter(enumerate(asked))

    async def work():
        for number, prompt in waiting:
            await ask(client, prompt, "a salt" if number % 10 == 0 else None)

    tasks = [asyncio.create_task(work()) for _ in range(PARALLEL)]
    while not all(task.done() for task in tasks):
        subscriber.poll(0)
        await asyncio.sleep(0.01)
    await asyncio.gather(*tasks)


def settle(subscriber):
    """Follow until nothing more comes: a batch is published behind the step that it tells of."""
    while subscriber.poll(0.3):
        pass
    subscriber.catch_up()


def test_a_subscriber_knows_what_vllm_has_cached(server):
    url, events, replay = server
    asked = prompts(NUM_REQUESTS)

    async def follow():
        mirror = Mirror()
        with Subscriber(events, mirror, replay=replay) as subscriber:
            subscriber.poll(1)
            async with httpx.AsyncClient(base_url=url, timeout=300) as client:
                begun = time.monotonic()
                await ask_all(client, asked, subscriber)
                seconds = time.monotonic() - begun
                seen = []
                for number in range(60):
                    settle(subscriber)
                    assert not subscriber.is_degraded
                    prompt = asked[-1 - 3 * number]
                    salt = "a salt" if number % 6 == 0 else None
                    known = mirror.lookup(prompt[:-1], extra_keys=[[salt]] if salt else ())
                    seen.append((known, await ask(client, prompt, salt, 1)))
                settle(subscriber)
                mirror.check()
                follower = subscriber.following
                sys.stdout.write(
                    f"{len(asked)} requests in {seconds:.0f} s, {follower.next_number} batches, "
                    f"{len(mirror)} of {BLOCKS} blocks cached, {sum(a > 0 for a, _ in seen)} of {len(seen)} hit\n"
                )
                # One who joins now has it all from the replay.
                late = Mirror()
                with Subscriber(events, late, replay=replay) as other:
                    other.poll(0)
                    assert other.is_degraded == (follower.next_number > 10_000)
                    if not other.is_degraded:
                        assert late.num_copies == mirror.num_copies
                return seen

    seen = asyncio.run(follow())
    assert [known for known, _ in seen] == [cached for _, cached in seen]
    assert any(known for known, _ in seen)
    assert not all(
        known == (len(prompt) - 1) // 16 * 16
        for (known, _), prompt in zip(seen, asked[::-3], strict=False)
    )


def test_a_router_finds_what_an_adapter_of_vllm_has_cached_by_its_name(tmp_path):
    write_adapter(tmp_path / "adapter", demo_model(), 1)
    words = ("--enable-lora", "--max-lora-rank", "8")
    modules = ("--lora-modules", f"writer={tmp_path / 'adapter'}")
    prompt = [5 + 7 * at % 240 for at in range(300)]
    with serving(tmp_path, *words, *modules) as (url, events, replay):
        prefixes = ToldPrefixes(1 << 10, {"one": f"{events},{replay}"})

        def found(model, salt=None):
            return prefixes.found(np.array(prompt, np.int32), salt, None, model)

        asked = {"model": "writer", "prompt": prompt, "max_tokens": 1, "cache_salt": "mine"}
        httpx.post(f"{url}/v1/completions", json=asked, timeout=300).raise_for_status()
        until = time.monotonic() + 30
        while not found("writer", "mine") and time.monotonic() < until:
            time.sleep(0.1)
        assert found("writer", "mine") == {"one": (256, 0, 0)}  # of two blocks of a CPU
        assert found("writer") == found("tiny", "mine") == found("tiny") == {}
        prefixes.close()


def test_a_router_and_a_mirror_see_blocks_that_only_a_tier_has(tmp_path):
    ours = {
        "kv_connector": "QuireConnector",
        "kv_connector_module_path": "quire.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": options(f"disk:{tmp_path / 'kv'}?capacity=1GiB"),
    }
    words = ("--kv-transfer-config", json.dumps(ours), "--block-size", "32")
    prompt = [5 + 7 * at % 240 for at in range(300)]
    others = [[5 + (11 + each) * at % 240 for at in range(900)] for each in range(12)]
    with serving(tmp_path, *words) as (url, events, replay):
        mirror = Mirror()
        prefixes = ToldPrefixes(1 << 10, {"one": f"{events},{replay}"})
        asked = {"model": "tiny", "max_tokens": 1, "cache_salt": "mine"}

        def ask(each):
            answer = httpx.post(f"{url}/v1/completions", json=asked | {"prompt": each}, timeout=300)
            details = answer.raise_for_status().json()["usage"]["prompt_tokens_details"]
            return (details or {}).get("cached_tokens") or 0

        def found():
            return prefixes.found(np.array(prompt, np.int32), "mine", None, "tiny").get("one")

        with Subscriber(events, mirror, replay=replay) as subscriber:
            subscriber.poll(1)
            ask(prompt)
            until = time.monotonic() + 60
            stored = 0
            while stored < 288 and time.monotonic() < until:
                settle(subscriber)
                stored = mirror.lookup(prompt, medium="STORAGE", extra_keys=[["mine"]])
            assert stored == mirror.lookup(prompt, extra_keys=[["mine"]]) == 288
            for each in others:  # a pool of 300 blocks of 32 keeps 9,600 tokens
                ask(each)
            settle(subscriber)
            mirror.check()
            assert mirror.lookup(prompt, extra_keys=[["mine"]]) == 0
            assert mirror.lookup(prompt, medium="STORAGE", extra_keys=[["mine"]]) == 288
            assert mirror.lookup(prompt, medium="STORAGE") == 0
            assert found() == (0, 0, 288)
            assert ask(prompt) == 288
        prefixes.close()


def published(publisher, count):
    """Wait until so many batches were published."""
    begun = time.monotonic()
    while publisher.num_batches < count:
        assert time.monotonic() < begun + 10, f"{publisher.num_batches} of {count} batches"
        time.sleep(0.01)


def test_vllm_reads_what_quire_publishes():
    manager = CacheManager(64, 4, watchers=[EventLog()])
    any_port = "tcp://127.0.0.1:0"
    with Publisher(manager, any_port, replay=any_port) as publisher:
        reader = subprocess.Popen(
            [
                ENVIRONMENT / "bin/python",
                Path(__file__).parent / "read_events.py",
                publisher.endpoint,
                publisher.replay,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert reader.stdout.readline() == "listening\n"
        time.sleep(1)  # the subscription is on its way
        for number in range(3):
            prompt = [number * 100 + at for at in range(8)]
            seq = manager.open(prompt)
            manager.reserve(seq, 8)
            manager.commit(seq, prompt)
            manager.close(seq)
            published(publisher, number + 1)
        ops.invalidate(manager, prompt)
        published(publisher, 4)  # a reset takes back what was to be told of single blocks
        manager.reset()
        told = json.loads(reader.communicate(timeout=120)[0])
    assert told["live"] == told["replayed"] >= 4
    kinds = [event["type"] for event in told["events"]]
    assert kinds[:4] == ["BlockStored"] * 3 + ["BlockRemoved"]
    assert kinds[-1] == "AllBlocksCleared"
    first = told["events"][0]
    assert (first["token_ids"], first["block_size"], first["medium"]) == (list(range(8)), 4, "GPU")
