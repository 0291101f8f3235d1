"""Requests to an engine beside `model.generate` of the same model."""

import functools
import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "differential"))

from hf_help import EOS, VOCAB, tiny_config, tiny_model, trained_model  # noqa: F401

from quire import ops
from quire.engines.loop import Engine, SamplingParams

TIE = 1e-4
"""The plain model's two likeliest tokens are as good as each other, so near do their logits lie."""

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@functools.cache
def plain_answer(model, prompt, max_tokens):
    """What `model.generate` says to a tuple of tokens."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens)
    return tuple(out[0, len(prompt) :].tolist())


def is_tie(model, tokens):
    """Whether the plain model's two likeliest tokens behind these lie within `TIE`."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    return first - second <= TIE


def ties(model, prompt, got, max_tokens):
    """0 where an answer is the plain one, 1 where it leaves that one at a tie; else an AssertionError."""
    wanted = plain_answer(model, tuple(prompt), max_tokens)
    if tuple(got) == wanted:
        return 0
    same = next(i for i in range(len(wanted)) if i == len(got) or got[i] != wanted[i])
    assert is_tie(model, [*prompt, *wanted[:same]]), (prompt, got, wanted)
    return 1


def nothing_held(engine):
    """Check that an engine that has ended all requests holds nothing of them, but for tiers that are copying it."""
    while not engine.is_settled:
        time.sleep(0.01)
    ops.check(engine.manager)
    assert engine.manager.num_active == 0
    assert not engine.manager.sequences
    assert len(engine.scheduler) == len(engine._sampler) == len(engine._answers) == 0
    assert not engine.has_unfinished()


class Traffic:
    """Requests of many kinds that arrive, share prefixes and are aborted at random, beside plain answers.

    `ties` counts answers that leave the plain one where its two likeliest tokens are as good as each other.
    """

    def __init__(self, model, seed, **options):
        self.model = model
        self.random = random.Random(seed)
        self.engine = Engine(model, debug_nan=True, **options)
        self.texts = [self._tokens(40) for _ in range(3)]
        self.asked = {}
        self.ties = self.compared = self.aborted = 0

    def run(self, num_requests):
        left = num_requests
        while left or self.engine.has_unfinished():
            for _ in range(min(left, self.random.choice((0, 0, 0, 1, 1, 2, 6)))):
                self._ask()
                left -= 1
            if self.asked and self.random.random() < 0.04:
                self._abort()
            for output in self.engine.step():
                self._take(output)
            if self.random.random() < 0.1:
                ops.check(self.engine.manager)
        assert not self.asked
        nothing_held(self.engine)
        return self

    def _tokens(self, num_tokens):
        return [self.random.randrange(3, VOCAB) for _ in range(num_tokens)]

    def _ask(self):
        text = self.random.choice(self.texts)
        kept = self.random.choice((0, 3, 8, 16, 17, 24, 39, 40))
        prompt = text[:kept] + self._tokens(self.random.choice((1, 2, 5, 11, 21)))
        params = SamplingParams(
            temperature=0,
            max_tokens=self.random.choice((1, 2, 7, 13)),
            n=self.random.choice((1, 1, 1, 1, 3)),
            speculation=self.random.choice((0, 0, 0, 3)),
        )
        priority = self.random.choice((0, 0, 0, 5))
        self.asked[self.engine.add_request(prompt, params, priority=priority)] = prompt, params

    def _abort(self):
        request_id = self.random.choice(list(self.asked))
        self.engine.abort(request_id)
        del self.asked[request_id]
        self.aborted += 1

    def _take(self, output):
        assert output.error is None, output.error
        if not output.finished:
            return
        prompt, params = self.asked.pop(output.request_id)
        assert output.prompt_token_ids == prompt
        assert len(output.outputs) == params.n
        for answer in output.outputs:
            got = answer.token_ids
            assert answer.finish_reason == ("stop" if got[-1] == EOS else "length")
            self.ties += ties(self.model, prompt, got, params.max_tokens)
            self.compared += 1
