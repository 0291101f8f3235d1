"""The verdict on a real model, and what it serves: an engine with passages beside one without.

    python benchmarks/passages_verdict.py MODEL [--prompts 100] [--threads 1]

MODEL is a folder of a model and its tokenizer; prompts are those of `quire bench passages --model`, and `Passages()` has
its defaults. The engine answers exactly until a policy is chosen: comparisons and captures are told apart. From then on
each prompt that reuses passages goes to both engines in turn. Figures are CPU seconds to the first token, and the
answers of up to 32 tokens that are the same.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from itertools import islice

import torch

from quire.cli import models
from quire.engines.loop import Engine, SamplingParams
from quire_passages import Passages
from quire_passages.bench.asked_text import TextSizes, text_prompts

PARAMS = SamplingParams(temperature=0, max_tokens=32)


class Asked:
    """An engine that is asked, and the CPU seconds that it takes."""

    def __init__(self, model, tokenizer, passages):
        self.engine = Engine(model, tokenizer, kv_memory="1GiB", passages=passages)
        self.first_s, self.total_s, self.apart_s = [], 0.0, 0.0

    def ask(self, segments):
        """Return the answer and the report of a prompt; comparisons and captures come behind it."""
        started = time.process_time()
        parts = [segments.head, *segments.passages, segments.question]
        self.engine.add_request({"segments": parts}, PARAMS)
        first = None
        while True:
            news = self.engine.step()
            if news and first is None:
                first = time.process_time() - started
            if news and news[0].finished:
                break
        ended = time.process_time()
        while self.engine.has_unfinished():
            self.engine.step()
        self.first_s.append(first)
        self.total_s += ended - started
        self.apart_s += time.process_time() - ended
        return news[0].outputs[0].token_ids, news[0].passages


def measured(model, tokenizer, count, sizes):
    own, plain = Asked(model, tokenizer, Passages("4GiB")), Asked(model, tokenizer, None)
    reasons, ratios, same, warm_up = Counter(), [], 0, None
    for number, segments in enumerate(islice(text_prompts(tokenizer, sizes), count)):
        if warm_up is not None and number % 2:
            exact, _ = plain.ask(segments)
        answer, report = own.ask(segments)
        if warm_up is None and report.fallback is None:
            warm_up = number
        if warm_up is None:
            print(f"{number + 1}: {report.fallback}", flush=True)
            continue
        if not number % 2 or number == warm_up:
            exact, _ = plain.ask(segments)
        reason = report.fallback or report.selector
        reasons[reason if report.fallback is None else "too small a gain"] += 1
        if report.fallback is None:
            ratios.append(own.first_s[-1] / plain.first_s[-1])
            same += answer == exact
        print(
            f"{number + 1}: {own.first_s[-1]:.2f} s of {plain.first_s[-1]:.2f}, {reason}",
            flush=True,
        )
    return {
        "prompts": count,
        "warm_up": warm_up,
        "served": len(ratios),
        "reasons": reasons,
        "estimate": None if report.estimate is None else str(report.estimate),
        "first_token_ratio": statistics.median(ratios) if ratios else None,
        "greatest_ratio": max(ratios, default=None),
        "same_answers": same,
        "requests_s": own.total_s,
        "comparisons_and_captures_s": own.apart_s,
        "plain_requests_s": plain.total_s,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--passage-tokens", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    longest = options.passage_tokens
    sizes = TextSizes(tokens=(longest * 3 // 8, longest))
    model, tokenizer = models.load(options.model, "float32")
    print(json.dumps(measured(model, tokenizer, options.prompts, sizes)))
