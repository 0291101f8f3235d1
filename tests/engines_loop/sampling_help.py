"""Sampling as it is defined: one request at a time, one rule after the other, in float64."""

import numpy as np

VOCAB = 24
EOS = (2,)


def uniform(seed, step):
    """Return number `step` of a seed's stream."""
    return (
        int(np.random.Philox(key=seed % 2**64).random_raw(step + 1)[step] >> np.uint64(11)) / 2**53
    )


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def log_softmax(x):
    x = x.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def choose(logits, params, prompt, answer, eos=EOS):
    """Return the next token of an answer."""
    x = logits.astype(np.float64)
    if params.allowed_token_ids:
        x[[token for token in range(len(x)) if token not in params.allowed_token_ids]] = -np.inf
    left = x.copy()
    for word in params.bad_words or ():
        for *begin, last in (Letters.ids(word.strip()), Letters.ids(" " + word.strip())):
            if answer[len(answer) - len(begin) :] == begin:
                left[last] = -np.inf
    x = x if np.isneginf(left).all() else left
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(answer) < params.min_tokens:
        for token in [*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos)]:
            x[token] = -np.inf
    for token in range(len(x)):
        times = answer.count(token)
        if times or token in prompt:
            by = params.repetition_penalty
            x[token] = x[token] / by if x[token] > 0 else x[token] * by
        x[token] -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
    if params.temperature == 0:
        return int(np.argmax(x))
    x /= params.temperature
    x[softmax(x) < params.min_p * softmax(x).max() * (1 - 1e-6)] = -np.inf
    if params.top_k > 0:
        x[x < sorted(x)[-min(params.top_k, len(x))]] = -np.inf
    if params.top_p < 1:
        shares, mass, kept = softmax(x), 0.0, set()
        for token in np.argsort(-x, kind="stable"):
            if mass >= params.top_p and x[token] not in kept:
                x[token] = -np.inf
            mass += shares[token]
            kept.add(x[token])
    number, mass = uniform(params.seed, len(answer)), 0.0
    for token, share in enumerate(softmax(x)):
        mass += share
        if mass > number:
            return token
    raise AssertionError("the shares add up to less than one")


class Letters:
    """A tokenizer whose tokens are letters from "a" on; a space is the last one of `VOCAB`."""

    @staticmethod
    def ids(text):
        return [VOCAB - 1 if letter == " " else ord(letter) - ord("a") for letter in text]

    def __call__(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": self.ids(text)}


class Toy:
    """A model of one token's memory: logits are fixed by the last two tokens."""

    def __init__(self, seed=0, vocab=VOCAB, spread=2.0):
        self.vocab = vocab
        self.table = np.random.default_rng(seed).normal(0, spread, (997, vocab)).astype(np.float32)

    def __call__(self, tokens):
        last, before = int(tokens[-1]), int(tokens[-2]) if len(tokens) > 1 else 0
        return self.table[(last * 31 + before) % 997]
