"""What chunk reuse saves of the time to an answer of one token, through the server: 2,048 tokens of documents, on the CPU.

    python benchmarks/chunk_served.py

A Llama of 12 layers with random weights behind `quire serve`'s own application, in this process, asked over HTTP on
loopback: a chat with eight documents in an order that was not asked before, whose first one differs each time, so that
prefixes have the system prompt alone. Without chunks the same engine computes the same prompt. Medians; servers one after the other.
"""

import argparse
import random
import statistics
import threading
import time
from contextlib import contextmanager

import httpx
import torch
from chunk_times import model_of
from transformers import AutoTokenizer

from quire import demo_model
from quire.chunks import Chunks, named_selector
from quire.cli.serve import listen
from quire.engines.loop import AsyncEngine, Engine
from quire.serve.server import ModelServer
from quire.serve.service import Bounds, ServedModel
from quire.web.keys import ApiKeys

NUM_DOCUMENTS, TOKENS = 8, 256
SELECTORS = [None, "epic-share:0.2", "kv-deviation:0.15"]


@contextmanager
def served(model, tokenizer, chunks):
    engine = AsyncEngine(Engine(model, tokenizer, kv_memory="512MiB", chunks=chunks))
    service = ServedModel(engine, "model", ApiKeys(), Bounds())
    listening, url = listen("127.0.0.1", 0, 60.0)
    server = ModelServer(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield url, engine.engine
    finally:
        server.should_exit = True
        thread.join()
        engine.close()


def documents_of(tokenizer):
    """Return texts of about so many tokens, made of other words each."""
    source, found = random.Random(0), []
    for _ in range(NUM_DOCUMENTS):
        text = ""
        while len(tokenizer(text).input_ids) < TOKENS:
            text += (
                "".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randint(2, 8))) + " "
            )
        found.append(text)
    return found


def ask(client, documents):
    messages = [
        {"role": "system", "content": "Answer from the documents, and say where it stands."},
        {"role": "user", "content": "What does it say of lists?"},
    ]
    body = {"messages": messages, "documents": documents, "max_tokens": 1, "temperature": 0}
    return client.post("/v1/chat/completions", json=body).json()


def measured(model, tokenizer, line, rounds):
    """Return the median of the seconds that an answer takes, and what the last one says of its documents."""
    chunks = None if line is None else Chunks("512MiB", named_selector(line))
    texts = documents_of(tokenizer)
    with (
        served(model, tokenizer, chunks) as (url, engine),
        httpx.Client(base_url=url, timeout=600) as client,  # one, as each reads certificates first
    ):
        ask(client, texts)
        while engine.has_unfinished():
            time.sleep(0.05)
        times, source = [], random.Random(1)
        for first in range(1, rounds + 1):
            others = [text for at, text in enumerate(texts) if at != first]
            source.shuffle(others)
            started = time.perf_counter()
            answer = ask(client, [texts[first], *others])
            times.append(time.perf_counter() - started)
    return statistics.median(times), answer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, choices=range(1, NUM_DOCUMENTS))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = model_of(12, 512), AutoTokenizer.from_pretrained(demo_model())
    model.generation_config.eos_token_id = None
    plain = None
    for line in SELECTORS:
        seconds, answer = measured(model, tokenizer, line, options.rounds)
        plain = plain or seconds
        told = [
            (each["exactness"], each["exact_tokens"], each["moved_tokens"], each["recomputed_rows"])
            for each in answer.get("chunks", ())
        ]
        prompt = answer["usage"]["prompt_tokens"]
        print(
            f"{line or 'plain':20} {seconds * 1e3:8.1f} ms  {plain / seconds:5.2f} x  of {prompt} {told}"
        )
