"""CPU time saved by passages until the first token: a prompt of 2,048 tokens of passages, on the CPU.

    python benchmarks/passages_times.py [--model FOLDER]

A model of yours, or a Llama of 12 layers with random weights, `PrefixCache.generate` end to end: lookup, plan, K and V
rotated and placed, rows computed, one token. Passages are captured before; each round brings them in
an order that was not asked before, so that the prefix cache has the head alone. Plain prefill is the same
call of a cache without passages. Figures are CPU seconds, medians over the rounds, which take turns.

And planning alone: 64 passages of 512 tokens, all in a store that holds as many others.
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from quire.core import Scope
from quire.engines.hf import PrefixCache
from quire_passages import (
    Epic,
    EpicShare,
    KVDeviation,
    NoRows,
    Passages,
    PassageStore,
    QuestionRows,
    Reach,
    Segments,
    Variant,
    make_plan,
)

NUM_PASSAGES, PASSAGE, HEAD, QUESTION = 8, 256, 32, 24
SELECTORS = [
    EpicShare(0.2),
    KVDeviation(0.15),
    *(KVDeviation(0.15, check) for check in (2, 3)),
    QuestionRows(0.15),
    QuestionRows(0.33),
    Epic(16),
    NoRows(),
]


def model_of(layers, width):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(width // 128, 1),
        max_position_embeddings=8192,
        initializer_range=0.05,
    )
    return LlamaForCausalLM(config).eval()


def prompts(rounds):
    source = np.random.default_rng(0)
    head, question = source.integers(3, 1000, HEAD), source.integers(3, 1000, QUESTION)
    passages = [source.integers(3, 1000, PASSAGE) for _ in range(NUM_PASSAGES)]
    for _ in range(rounds):
        order = source.permutation(NUM_PASSAGES)
        yield Segments.of([head, *(passages[index] for index in order), question])


def timed(call, *args, **given):
    started = time.process_time()
    call(*args, **given)
    return time.process_time() - started


def first_tokens(model, rounds):
    """Return the seconds to one token, plain and by selector, and the relocation's check layer."""
    # No prompt helps the next one, but for the head.
    given = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, "store_until": HEAD}
    plain = PrefixCache(model, "512MiB")
    caches = {
        each.name: PrefixCache(
            model, "512MiB", passages=Passages("1GiB", each, None, capture="none")
        )
        for each in SELECTORS
    }
    every = list(prompts(rounds + 1))
    for cache in caches.values():
        cache.passages.capture(every[0].passages, every[0].head)
    times = {"plain": []} | {name: [] for name in caches}
    rows = {}
    for number, segments in enumerate(every):
        ids = torch.from_numpy(segments.tokens.astype(np.int64))[None]
        took = {"plain": timed(plain.generate, ids, attention_mask=torch.ones_like(ids), **given)}
        for name, cache in caches.items():
            took[name] = timed(cache.generate, segments=segments, **given)
            report = cache.last.passages
            rows[name] = [report.exact_tokens, report.moved_tokens, report.recomputed_rows]
        if number:  # the first one warms up
            for name, seconds in took.items():
                times[name].append(seconds)
    check = caches[SELECTORS[0].name].passages.relocation().check_layer
    return {name: statistics.median(each) for name, each in times.items()}, rows, check


class Held:
    num_bytes = 1


def planning(rounds):
    """Return the seconds of a lookup and plan of 64 passages of 512 tokens."""
    source = np.random.default_rng(0)
    store, scope = PassageStore("1GiB"), Scope(model="m")
    head, question = source.integers(3, 1000, HEAD), source.integers(3, 1000, QUESTION)
    passages = [source.integers(3, 1000, 512).astype(np.int32) for _ in range(128)]
    before = head.astype(np.int32).tobytes()
    for ids in passages:
        store.put(scope, Variant(ids.tobytes(), before, "isolated", Held()))
    settings, limits = Passages(selector=Epic(16)), Reach(1_000_000, 0.25)
    times = []
    for _ in range(rounds):
        order = source.permutation(128)[:64]
        segments = Segments.of([head, *(passages[index] for index in order), question])
        given = {"settings": settings, "limits": limits}
        times.append(timed(make_plan, segments, store, scope, 0, **given))
    return statistics.median(times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--model", help="a folder, in place of random weights")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.model is None:
        model = model_of(options.layers, options.width)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    seconds, rows, check = first_tokens(model, options.rounds)
    layers, width = model.config.num_hidden_layers, model.config.hidden_size
    print(f"{layers} layers of {width}, {options.threads} threads, check layer {check}")
    for name, took in seconds.items():
        told = rows.get(name, "")
        print(f"{name:26} {took * 1e3:8.1f} ms  {seconds['plain'] / took:5.2f} x  {told}")
    plan = planning(50)
    print(f"planning 64 passages of 512 tokens: {plan * 1e3:.3f} ms")
    print(json.dumps({"seconds": seconds, "planning_s": plan}))
