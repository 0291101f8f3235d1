"""Time saved by passages until an answer of one token, through the server: 2,048 tokens, on the CPU.

    python benchmarks/passages_served.py

A Llama of 12 layers with random weights behind `quire serve`'s own application, in this process, asked over HTTP on
loopback: a chat with eight documents in an order that was not asked before, whose first one differs each time, so that
prefixes have the system prompt alone. Without passages the same engine computes the same prompt. Medians over the rounds, in
which the servers take turns.
"""

import argparse
import random
import statistics
import threading
import time
from contextlib import ExitStack, contextmanager

import httpx
import torch
from passages_times import model_of
from transformers import AutoTokenizer

from quire import demo_model
from quire.cli.listening import listen
from quire.engines.loop import AsyncEngine, Engine
from quire.serve.server import ModelServer
from quire.serve.service import Bounds, ServedModel
from quire.web.keys import ApiKeys
from quire_passages import Passages, named_selector

NUM_DOCUMENTS, TOKENS = 8, 256
SELECTORS = ["epic-share:0.2", "kv-deviation:0.15"]


@contextmanager
def served(model, tokenizer, passages):
    engine = AsyncEngine(Engine(model, tokenizer, kv_memory="512MiB", passages=passages))
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


class Asked:
    """A server that is asked about documents: the seconds of each answer, and the last one."""

    def __init__(self, opened, model, tokenizer, line):
        passages = None if line is None else Passages("512MiB", named_selector(line), None)
        url, self.engine = opened.enter_context(served(model, tokenizer, passages))
        # One client, as each reads certificates first.
        self.client = opened.enter_context(httpx.Client(base_url=url, timeout=600))
        self.seconds, self.answer = [], None

    def capture(self, documents):
        ask(self.client, documents)
        while self.engine.has_unfinished():
            time.sleep(0.05)

    def ask(self, documents):
        started = time.perf_counter()
        self.answer = ask(self.client, documents)
        self.seconds.append(time.perf_counter() - started)


def measured(model, tokenizer, rounds):
    """Return by selector the median of the seconds that an answer takes, and the last answer."""
    texts, source = documents_of(tokenizer), random.Random(1)
    with ExitStack() as opened:
        servers = {
            line or "plain": Asked(opened, model, tokenizer, line) for line in [None, *SELECTORS]
        }
        for server in servers.values():
            server.capture(texts)
        for first in range(1, rounds + 1):
            others = [text for at, text in enumerate(texts) if at != first]
            source.shuffle(others)
            for server in servers.values():
                server.ask([texts[first], *others])
    return {
        name: (statistics.median(server.seconds), server.answer) for name, server in servers.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, choices=range(1, NUM_DOCUMENTS))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = model_of(12, 512), AutoTokenizer.from_pretrained(demo_model())
    model.generation_config.eos_token_id = None
    found = measured(model, tokenizer, options.rounds)
    plain, _ = found["plain"]
    for name, (seconds, answer) in found.items():
        told = [
            (each["exactness"], each["exact_tokens"], each["moved_tokens"], each["recomputed_rows"])
            for each in answer.get("passages", ())
        ]
        prompt = answer["usage"]["prompt_tokens"]
        print(f"{name:20} {seconds * 1e3:8.1f} ms  {plain / seconds:5.2f} x  of {prompt} {told}")
