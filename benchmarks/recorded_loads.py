"""Loads that are recorded, and the files that a recorded run becomes."""

import gzip
import json
import random

VOCAB = 250
LOADS = {"light": (3.0, 24), "busy": (6.0, 24), "over": (25.0, 4.5)}
"""Requests per second, and for how many seconds they come."""


def load(seed, rate, seconds, *, shared):
    """Return requests: (arrival, prompt, output tokens), Poisson arrivals; heads are shared or not."""
    rng = random.Random(seed)
    heads = [tokens(rng, 384) for _ in range(4)]
    asked, now = [], 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        head = rng.choice(heads)[: 32 * rng.randrange(4, 13)] if shared else []
        asked.append((now, head + tokens(rng, rng.randrange(24, 700)), rng.randrange(8, 120)))
    return asked


def tokens(rng, count):
    return [rng.randrange(5, VOCAB) for _ in range(count)]


def row(arrival, prompt, outputs, ttft, total):
    """Return a row of a recorded run; its prompt is still in it."""
    return {
        "arrival_s": round(arrival, 4),
        "input_tokens": len(prompt),
        "output_tokens": outputs,
        "prompt": prompt,
        "ttft_s": round(ttft, 5),
        "total_s": round(total, 5),
    }


def write_run(path, header, rows, block_size):
    """Write a recorded run, with ids of chained blocks in place of prompts."""
    known, named = {}, []
    for each in sorted(rows, key=lambda each: each["arrival_s"]):
        prompt = each.pop("prompt")
        ends = range(block_size, len(prompt) + 1, block_size)
        ids = [known.setdefault(tuple(prompt[:end]), len(known)) for end in ends]
        named.append(each | {"block_ids": ids})
    write(path, [header, *named])


def write(path, rows):
    text = "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in rows)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
