"""quire's events, read from its sockets by Dynamo's own indexer: it finds the same hits as the manager."""

import os
import random
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("zmq", reason="install it with: pip install '.[observe]'")

import httpx

from quire import CacheManager, ops
from quire.exchange import EventLog
from quire.observe.zmq import Publisher

SIZE = 16
ENVIRONMENT = Path(os.environ.get("QUIRE_DYNAMO", Path(__file__).parents[2] / ".venv-dynamo"))
INSTALLED_BY = (
    f"python -m venv {ENVIRONMENT} && {ENVIRONMENT}/bin/pip install ai-dynamo-runtime==1.6.1"
)

pytestmark = pytest.mark.skipif(
    not (ENVIRONMENT / "bin/python").exists(), reason=f"no Dynamo: {INSTALLED_BY}"
)


class Indexer:
    """Dynamo's indexer, by its own interface over HTTP."""

    def __init__(self, url):
        self._client = httpx.Client(base_url=url, timeout=30)

    def _post(self, path, asked):
        answer = self._client.post(path, json={"model_name": "tiny"} | asked)
        return answer.raise_for_status().json()

    def is_there(self):
        try:
            return self._client.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def follow(self, number, publisher):
        told = {"instance_id": number, "block_size": SIZE, "endpoint": publisher.endpoint}
        self._post("/register", told | {"replay_endpoint": publisher.replay})

    def lookup(self, prompt):
        """Return the tokens of a prompt that each publisher has, by its number."""
        scores = self._post("/query", {"token_ids": prompt})["scores"]
        return {int(number): ranks["0"] for number, ranks in scores.items()}


@contextmanager
def indexer():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [ENVIRONMENT / "bin/python", "-m", "dynamo.indexer", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        made = Indexer(f"http://127.0.0.1:{port}")
        until(made.is_there)
        yield made
    finally:
        process.kill()
        process.wait()


@contextmanager
def publishing(num_blocks):
    manager = CacheManager(num_blocks, SIZE, watchers=[EventLog()])
    any_port = "tcp://127.0.0.1:0"
    with Publisher(manager, any_port, replay=any_port) as publisher:
        yield manager, publisher


def until(done):
    """Wait until something holds; the deadline only ends a test that failed."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def compute(manager, prompt):
    seq = manager.open(prompt)
    manager.reserve(seq, len(prompt) - seq.computed)
    manager.take_copies()
    manager.commit(seq, prompt[seq.computed :])
    manager.close(seq)


def prompts(rng):
    """Prompts that share beginnings of any length."""
    made = [[]]
    while True:
        before = rng.choice(made[-20:])
        cut = rng.randrange(len(before) // SIZE + 1) * SIZE
        made.append(before[:cut][:160] + [rng.randrange(1000) for _ in range(rng.randrange(1, 90))])
        yield made[-1]


class Marks:
    """Prompts that nobody has: once Dynamo knows one, it knows all that was told before it."""

    def __init__(self, dynamo, number, manager):
        self._dynamo, self._number, self._manager, self._next = dynamo, number, manager, 0

    def _compute(self):
        self._next += 1
        marked = [100_000 + self._next] * SIZE
        compute(self._manager, marked)
        return marked

    def _knows(self, marked):
        return self._dynamo.lookup(marked).get(self._number) == SIZE

    def is_heard(self):
        """Return whether it hears what is computed now: a subscription takes a while to arrive."""
        marked = self._compute()
        time.sleep(0.05)
        return self._knows(marked)

    def caught_up(self):
        marked = self._compute()
        until(lambda: self._knows(marked))


def test_its_indexer_finds_of_every_prompt_what_the_manager_finds():
    rng = random.Random(3)
    num_found = 0
    with publishing(40) as (manager, publisher), indexer() as dynamo:
        marks, asked = Marks(dynamo, 7, manager), []
        for number, prompt in zip(range(400), prompts(rng), strict=False):
            compute(manager, prompt)
            asked.append(prompt)
            if number == 25:  # it joins late: what was told before comes from the replay
                until(lambda: publisher.num_batches > 0)
                dynamo.follow(7, publisher)
                until(marks.is_heard)
            if number % 40 == 30:
                ops.invalidate(manager, asked[-3])
            if number == 200:
                manager.reset()
            if number % 5 == 0 and number >= 25:
                marks.caught_up()
                for known in asked[-10:]:
                    found = manager.probe([*known, 0]).num_tokens // SIZE * SIZE
                    assert dynamo.lookup(known).get(7, 0) == found, (number, known)
                    num_found += found > 0
    assert num_found > 400


def test_dynamo_tells_two_publishers_apart():
    with publishing(40) as (one, first), publishing(40) as (other, second), indexer() as dynamo:
        dynamo.follow(1, first)
        dynamo.follow(2, second)
        marks = Marks(dynamo, 1, one), Marks(dynamo, 2, other)
        for each in marks:
            until(each.is_heard)
        prompt = list(range(4 * SIZE))
        compute(one, prompt)
        compute(other, prompt[: 2 * SIZE])
        for each in marks:
            each.caught_up()
        assert dynamo.lookup(prompt) == {1: 4 * SIZE, 2: 2 * SIZE}
