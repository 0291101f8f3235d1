"""What quire publishes, in the index that Dynamo routes by: it finds of every prompt what the manager finds."""

import json
import random

import pytest

pytest.importorskip("dynamo.llm", reason="install it with: pip install ai-dynamo-runtime==1.6.1")

from dynamo.llm import RadixTree, compute_block_hash_for_seq

from quire import CacheManager, ops
from quire.exchange import EventLog
from quire.exchange.wire import RemovedEvent, StoredEvent, decode_batch
from quire.observe import BatchStream

SIZE = 16


def in_json(number, event):
    """An event as Dynamo's index reads it; it names tokens by hashes of its own."""
    match event:
        case StoredEvent():
            theirs = compute_block_hash_for_seq(event.token_ids, event.block_size)
            pairs = zip(event.block_hashes, theirs, strict=True)
            blocks = [{"block_hash": name, "tokens_hash": tokens} for name, tokens in pairs]
            data = {"stored": {"parent_hash": event.parent_block_hash, "blocks": blocks}}
        case RemovedEvent():
            data = {"removed": {"block_hashes": event.block_hashes}}
        case _:
            data = "cleared"
    return json.dumps({"event_id": number, "data": data}).encode()


def prompts(rng):
    """Prompts that share beginnings of any length."""
    made = [[]]
    while True:
        before = rng.choice(made[-20:])
        cut = rng.randrange(len(before) // SIZE + 1) * SIZE
        made.append(before[:cut][:160] + [rng.randrange(1000) for _ in range(rng.randrange(1, 90))])
        yield made[-1]


def test_its_index_finds_of_every_prompt_what_the_manager_finds():
    rng = random.Random(3)
    manager = CacheManager(40, SIZE, watchers=[EventLog()])
    stream, tree = BatchStream(manager), RadixTree()
    asked, num_events, num_found = [], 0, 0
    for number, prompt in zip(range(400), prompts(rng), strict=False):
        seq = manager.open(prompt)
        manager.reserve(seq, len(prompt) - seq.computed)
        manager.take_copies()
        manager.commit(seq, prompt[seq.computed :])
        manager.close(seq)
        asked.append(prompt)
        if number % 40 == 30:
            ops.invalidate(manager, asked[-3])
        if number == 200:
            manager.reset()
        for _, payload in stream.take():
            for event in decode_batch(payload).events:
                num_events += 1
                tree.apply_event(7, in_json(num_events, event))
        for known in asked[-10:]:
            scores = tree.find_matches(compute_block_hash_for_seq(known, SIZE)).scores
            found = manager.probe([*known, 0]).num_tokens // SIZE
            assert scores.get((7, 0), 0) == found, (number, known)
            num_found += found > 0
    assert (num_events > 800, num_found > 1000) == (True, True), (num_events, num_found)
