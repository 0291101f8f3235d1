"""An engine beside `model.generate` of the same model."""

import functools
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "differential"))

from hf_help import EOS, VOCAB, make_cache, tiny_config, tiny_model, trained_model  # noqa: F401

from quire import ops
from quire.engines.loop import SamplingParams

TIE = 1e-4
"""The plain model's two likeliest tokens are as good as each other, so near do their logits lie."""

GREEDY = SamplingParams(temperature=0, max_tokens=8)


LONGEST = 16
"""Tokens of the plain model's answers, from which shorter ones are cut."""


@functools.cache
def _generated(model, prompt, max_tokens):
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens)
    return tuple(out[0, len(prompt) :].tolist())


def plain_answer(model, prompt, max_tokens, stops=()):
    """The answer of `model.generate` to a prompt, up to the first of `stops`."""
    answer = _generated(model, tuple(prompt), max(max_tokens, LONGEST))[:max_tokens]
    return answer[: next((i + 1 for i, token in enumerate(answer) if token in stops), None)]


@functools.cache
def plain_scores(model, prompt):
    """The log-probabilities `[tokens - 1, vocab]` of all tokens behind each token of a prompt, a tuple."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt], device=model.device)).logits[0, :-1]
    return logits.float().log_softmax(-1).cpu()


def check_scores(model, prompt, told, top, *, whole=True):
    """Check what an engine told of a prompt's tokens, as far as it was computed where it is not `whole`."""
    assert told[0] is None
    assert len(told) == len(prompt) if whole else len(told) <= len(prompt)
    for token, around, right in zip(
        prompt[1:], told[1:], plain_scores(model, tuple(prompt)), strict=False
    ):
        own = around[token]
        assert next(iter(around)) == token
        assert abs(own.logprob - right[token]) < TIE, (prompt, own, right[token])
        near = 10 * TIE
        assert (right > own.logprob + near).sum() < own.rank <= (right > own.logprob - near).sum()
        best = sorted((each.logprob for each in around.values()), reverse=True)[:top]
        torch.testing.assert_close(torch.tensor(best), right.topk(top).values, atol=TIE, rtol=0)


def ties(model, prompt, got, max_tokens, stops=(), *, whole=True):
    """The number of ties at which an answer leaves the plain one; an AssertionError where it leaves at others.

    `whole`: the answer may not end before the plain one does.
    """
    prompt, got, count = list(prompt), list(got), 0
    while True:
        right = plain_answer(model, prompt, max_tokens, stops)[: None if whole else len(got)]
        if tuple(got) == right:
            return count
        at = next((i for i, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), None)
        assert at is not None, ("one is the beginning of the other", prompt, got, right)
        prompt += right[:at]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt], device=model.device)).logits[0, -1]
        assert logits.max() - logits[got[at]] <= TIE, (prompt, got[at:], right[at:])
        count += 1
        prompt.append(got[at])
        got, max_tokens = got[at + 1 :], max_tokens - at - 1
        if not max_tokens or prompt[-1] in (EOS, *stops):
            assert not got
            return count


def nothing_held(engine):
    """Check that an engine that has ended all requests holds nothing of them, but for tiers that are copying it."""
    while not engine.is_settled:
        time.sleep(0.01)
    ops.check(engine.manager)
    assert engine.manager.num_active == 0
    assert not engine.manager.sequences
    assert len(engine.scheduler) == len(engine._requests) == 0
    assert not engine.has_unfinished()
