"""From logits to tokens, greedy or drawn, for a whole batch at once.

In vLLM's order: allowed_token_ids, bad_words, logit_bias, min_tokens, the grammar, penalties, temperature, min_p, top_k, top_p. What these
leave is drawn from with one number: number i of the stream (Philox) that the request's seed fixes decides its
token i. So nothing that runs beside it and no draft can change an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.chat.grammars import Grammar, Grammars
from quire.core.tokens import INT32, IndexArray, IntArray
from quire.engines.loop.params import SamplingParams
from quire.errors import ConfigError, QuireError

_BLOCK = 64  # random numbers that are made at once, four for each value of Philox's counter
_PIECE = 1 << 24  # numbers that log-probabilities are computed from at once
_NONE = np.empty(0, INT32)


class Logprob(NamedTuple):
    """The logarithm of a token's probability, and its rank; 1 is the likeliest."""

    logprob: float
    rank: int


class Sampled(NamedTuple):
    """The tokens of a step: `tokens` int32, one for each answer; with drafts an array for each.

    `logprobs` has for each answer None, or a dict by token id for each of its tokens: the token itself, then the
    likeliest. None if no request asks for any.
    """

    tokens: IntArray | list[IntArray]
    logprobs: list[list[dict[int, Logprob]] | None] | None


@dataclass(eq=False)
class AnswerRules:
    """The rules and state by which the tokens of one answer are chosen.

    It has `num_tokens` so far, which number its random numbers too.
    """

    params: SamplingParams
    seed: int
    stops: Sequence[int] = ()
    known: np.ndarray = field(default_factory=lambda: np.empty(0, bool))
    """Whether the prompt has a token, [vocab_size] where that matters."""
    grammar: Grammar | None = None
    bad_words: Sequence[list[int]] = ()
    """Token ids of texts that do not come."""
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self._latest = list[int]()  # tokens of the answer, as many as a bad word may begin with
        self.counts = np.zeros(len(self.known), INT32)  # of the answer's tokens
        self._numbers = -1, np.empty(0)  # a block of them

    def take(self, tokens: IntArray) -> None:
        """Take the answer's next tokens."""
        self.num_tokens += len(tokens)
        if self.bad_words:
            self._latest += tokens.tolist()
            del self._latest[: -max(map(len, self.bad_words))]
        if self.params.penalised:
            np.add.at(self.counts, tokens, 1)
        if self.grammar is not None:
            self.grammar.take(tokens.tolist())

    def banned(self, ahead: list[int]) -> list[int]:
        """Return the tokens that would complete a bad word after `ahead`."""
        text = [*self._latest, *ahead]
        return [
            token for *begin, token in self.bad_words if not begin or text[-len(begin) :] == begin
        ]

    def number(self, at: int) -> float:
        """Return random number `at`, from 0 to below 1."""
        block, place = divmod(at, _BLOCK)
        if block != self._numbers[0]:
            source = np.random.Philox(key=self.seed, counter=block * _BLOCK // 4)
            self._numbers = block, (source.random_raw(_BLOCK) >> np.uint64(11)) * 2.0**-53
        return float(self._numbers[1][place])


class Sampler:
    """Chooses the tokens of many answers from rows of logits, `vocab_size` wide.

    Greedy answers that ask for nothing else have no rules, and a step of these is one pass over the logits.
    `tokenizer` and `eos_ids` are the model's; `seed` fixes the seeds of requests that have none.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        tokenizer: Any = None,
        eos_ids: Sequence[int] = (),
        seed: int | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._tokenizer = tokenizer
        self._grammars = Grammars(tokenizer, vocab_size, self._eos_ids)
        self._seeds = np.random.default_rng(seed)

    def rules(
        self, params: SamplingParams, prompt_ids: Sequence[int]
    ) -> Sequence[AnswerRules | None]:
        """Return the rules of each answer to a request. Raises `ConfigError` for parameters that this model cannot follow.

        The first answer's seed is the request's, and those of the others are made from it.
        """
        size, eos = self._vocab_size, () if params.ignore_eos else self._eos_ids
        stops = sorted({*eos, *(params.stop_token_ids or ())})
        allowed = params.allowed_token_ids or ()
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            if (most := max(getattr(params, name) or (), default=0)) >= size:
                raise ConfigError(f"{name} has token id {most}; this model's are below {size}")
        for name in ("logprobs", "prompt_logprobs"):
            if ((count := getattr(params, name)) or 0) > size:
                raise ConfigError(f"{name} is {count}; this model has {size} tokens only")
        if params.min_tokens and not {*(allowed or range(size))} - {*stops}:
            raise ConfigError("min_tokens leaves no token that may come: all are end tokens")
        if params.plain:
            return [None] * params.num_answers
        seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed % 2**64
        more = [np.random.SeedSequence([seed, i]) for i in range(1, params.num_answers)]
        seeds = [seed, *(int(each.generate_state(1, np.uint64)[0]) for each in more)]
        known = np.empty(0, bool)
        if params.penalised:
            known = np.bincount(np.asarray(prompt_ids, np.int64), minlength=size) > 0
        grammar, words = self.grammar(params), self._tokens_of(params.bad_words or ())
        return [
            AnswerRules(params, each, stops, known, grammar and grammar.copy(), words)
            for each in seeds
        ]

    def _tokens_of(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts, at the beginning of an answer and behind a space."""
        if words and self._tokenizer is None:
            raise ConfigError("bad_words needs a tokenizer; give the engine one")
        texts = [space + word.strip() for word in words for space in ("", " ")]
        ids = (self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        return [list(each) for each in ids if len(each)]

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar that a request asks for, on any thread. Raises `ConfigError`."""
        form = params.structured_outputs
        return form and self._grammars.open(*form.grammar_of, params.reasoning_tags)

    def sample(
        self,
        rules: Sequence[AnswerRules | None],
        logits: Tensor,
        drafts: Sequence[IntArray] | None = None,
    ) -> Sampled:
        """Choose the next tokens of each answer, and have its rules take them.

        `logits` [answers, vocab_size] are those of each one's last token. With `drafts` (int32, for each answer) a
        row for each of its drafts follows that of its last token; chosen are all drafts that would be chosen
        without drafts, and one token more. Raises `QuireError` for NaN and infinite logits, and takes nothing.
        """
        chosen = _likeliest(logits)
        guessed = drafts or [_NONE] * len(rules)
        places = _places(rules, guessed)
        if places:
            at = [place.at for place in places]
            chosen[at] = self._chosen(places, logits[at].float()).cpu().numpy()
        tokens: IntArray = chosen.astype(INT32)
        if not places and drafts is None:
            return Sampled(tokens, None)
        told = _told(places, logits, tokens)
        new: list[IntArray] = []
        logprobs: list[list[dict[int, Logprob]] | None] = []
        start = 0
        for each, ahead in zip(rules, guessed, strict=True):
            stop = start + num_accepted(ahead, tokens[start:]) + 1
            new.append(tokens[start:stop])
            logprobs.append([told[at] for at in range(start, stop)] if start in told else None)
            if each is not None:
                each.take(new[-1])
            start += len(ahead) + 1
        return Sampled(tokens if drafts is None else new, logprobs if told else None)

    def _chosen(self, places: list[_Place], x: Tensor) -> Tensor:
        """Return the tokens of places from their logits, float32, which are written over."""
        for mine, (_, rules, ahead) in zip(x, places, strict=True):
            if only := rules.params.allowed_token_ids:
                rest = torch.ones_like(mine, dtype=torch.bool)
                rest[list(only)] = False
                mine[rest] = -torch.inf
            if banned := rules.banned(ahead.tolist()) if rules.bad_words else ():
                left = mine.clone()
                left[list(banned)] = -torch.inf
                if not left.isneginf().all():  # else no token could come
                    mine.copy_(left)
            if bias := rules.params.logit_bias:
                mine[list(bias)] += _like(x, list(bias.values()))
            if rules.num_tokens + len(ahead) < rules.params.min_tokens:
                mine[rules.stops] = -torch.inf
            if rules.grammar is not None:
                allowed = rules.grammar.allowed(ahead.tolist())
                mine[~_like(x, allowed, torch.bool)] = -torch.inf
        if those := [i for i, place in enumerate(places) if place.rules.params.penalised]:
            x[those] = _penalised(x[those], [places[i] for i in those])
        chosen = x.argmax(dim=-1)
        if those := [i for i, place in enumerate(places) if not place.rules.params.greedy]:
            chosen[those] = _drawn(x[those], [places[i] for i in those])
        return chosen


def _likeliest(logits: Tensor) -> IndexArray:
    """Return the likeliest token of each row, the first of several; raise `QuireError` where there is none."""
    if logits.is_cpu:  # NumPy takes a fifth of the time
        rows = logits.float().numpy()
        chosen = rows.argmax(axis=-1)
        top = rows[np.arange(len(rows)), chosen]
    else:
        top, chosen = (each.cpu().numpy() for each in logits.float().max(dim=-1))
    if not np.isfinite(top).all():
        raise QuireError("the model's logits are NaN or infinite: no token can be chosen")
    return chosen


class _Place(NamedTuple):
    """A row of logits: where, by whose rules, and the drafts between that one's last token and it."""

    at: int
    rules: AnswerRules
    ahead: IntArray


def _places(rules: Sequence[AnswerRules | None], drafts: Sequence[IntArray]) -> list[_Place]:
    """Return the rows of logits that need more than the likeliest token."""
    places: list[_Place] = []
    at = 0
    for each, ahead in zip(rules, drafts, strict=True):
        if each is not None:
            places += [_Place(at + j, each, ahead[:j]) for j in range(len(ahead) + 1)]
        at += len(ahead) + 1
    return places


def _like(x: Tensor, values: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.as_tensor(values, dtype=dtype or x.dtype, device=x.device)


def _column(x: Tensor, places: list[_Place], name: str) -> Tensor:
    """Return a parameter of each place, [places, 1]."""
    return _like(x, [[getattr(place.rules.params, name)] for place in places])


def _penalised(x: Tensor, places: list[_Place]) -> Tensor:
    counts = np.stack([place.rules.counts for place in places])
    for mine, place in zip(counts, places, strict=True):
        np.add.at(mine, place.ahead, 1)
    times, known = _like(x, counts), _like(x, np.stack([place.rules.known for place in places]))
    by = torch.where(times + known > 0, _column(x, places, "repetition_penalty"), 1.0)
    y = torch.where(x > 0, x / by, x * by) - _column(x, places, "frequency_penalty") * times
    y = y - _column(x, places, "presence_penalty") * (times > 0)
    most = torch.finfo(x.dtype).max  # a penalty rules out nothing
    return torch.where(x.isneginf(), x, y.clamp(-most, most))


def _drawn(x: Tensor, places: list[_Place]) -> Tensor:
    """Return the tokens that the random numbers of these places draw."""
    x = (x - x.amax(dim=-1, keepdim=True)) / _column(x, places, "temperature")
    if those := [i for i, place in enumerate(places) if place.rules.params.narrow]:
        narrow = [places[i] for i in those]
        min_p, top_k, top_p = (_column(x, narrow, name) for name in ("min_p", "top_k", "top_p"))
        x[those] = kept(x[those], min_p, top_k, top_p)
    below = x.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    numbers = [[rules.number(rules.num_tokens + len(ahead))] for _, rules, ahead in places]
    return torch.searchsorted(below, _like(below, numbers) * below[:, -1:], right=True)[:, 0]


def kept(x: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, width: int = 1024) -> Tensor:
    """Return logits [R, V] with -inf for tokens that fall to a rule; each rule is [R, 1].

    Only the likeliest `width` tokens are put in order, unless these do not suffice.
    """
    size = x.shape[-1]
    width = min(width, size)
    top_k = torch.where(top_k == 0, size, top_k).long()
    largest = x.topk(width).values
    least = largest[:, :1] + min_p.log()
    kth = largest.gather(-1, top_k.clamp(max=width) - 1)
    left = x.masked_fill(x < torch.where(top_k < size, kth, least).maximum(least), -torch.inf)
    shares = (largest - left.logsumexp(dim=-1, keepdim=True)).exp().double()
    num = (shares.cumsum(dim=-1) - shares < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    short = (top_k < size) & (top_k > width) | (top_p < 1) & (num == width)
    if width < size and bool(short.any()):
        return kept(x, min_p, top_k, top_p, size)
    return left.masked_fill((left < largest.gather(-1, num - 1)) & (top_p < 1), -torch.inf)


def _told(places: list[_Place], logits: Tensor, tokens: IntArray) -> dict[int, dict[int, Logprob]]:
    """Return what those who ask for it are told of the tokens, by row of logits."""
    those = [place for place in places if place.rules.params.num_logprobs is not None]
    if not those:
        return {}
    at = [place.at for place in those]
    tops = [place.rules.params.num_logprobs or 0 for place in those]
    return dict(zip(at, logprobs_of(tokens[at], logits[at], tops), strict=True))


def logprobs_of(tokens: IntArray, logits: Tensor, tops: Sequence[int]) -> list[dict[int, Logprob]]:
    """Return log-probabilities by rows of logits `[rows, vocab]`: of each row's token, and of its likeliest ones.

    `tops` says how many likeliest ones of each row. Rows are taken `_PIECE` float32 numbers at a time. Raises
    `QuireError` for NaN.
    """
    told: list[dict[int, Logprob]] = []
    size = max(_PIECE // logits.shape[-1], 1)
    for start in range(0, len(tokens), size):
        piece = slice(start, start + size)
        x = logits[piece].float().log_softmax(dim=-1)
        own = x.gather(-1, _like(x, tokens[piece, None], torch.int64))
        best = x.topk(max(tops[piece]))
        columns = [part.cpu().numpy() for part in (own[:, 0], (x >= own).sum(dim=-1), *best)]
        if np.isnan(columns[0]).any():
            raise QuireError("the model's logits are NaN or infinite: no token has a probability")
        for token, top, logprob, rank, values, ids in zip(
            tokens[piece].tolist(), tops[piece], *columns, strict=True
        ):
            told.append(mine := {token: Logprob(float(logprob), int(rank))})
            for i in range(top):
                mine.setdefault(int(ids[i]), Logprob(float(values[i]), i + 1))
    return told


_LONGEST = 3
"""Tokens that are looked for in the text before: at most so many, then fewer, down to one."""


def propose(tokens: IntArray, max_drafts: int) -> IntArray:
    """Return draft tokens for `tokens` (int32 [n], prompt and answer), int32, at most `max_drafts`.

    The drafts follow an earlier occurrence of the longest possible suffix of one to three tokens (A. Saxena, "Prompt
    Lookup Decoding", 2023): the last occurrence that `max_drafts` tokens follow, or else the first.
    """
    for size in range(min(_LONGEST, len(tokens) - 1), 0, -1):
        tail = tokens[-size:]
        # Where its last token stands; the end itself is not asked.
        ends = size - 1 + np.flatnonzero(tokens[size - 1 : -1] == tail[-1])
        for back in range(1, size):
            ends = ends[tokens[ends - back] == tail[-1 - back]]
        if len(ends):
            full = ends[ends < len(tokens) - max_drafts]
            start = int(full[-1] if len(full) else ends[0]) + 1
            return tokens[start : start + max_drafts].astype(INT32)
    return _NONE


def num_accepted(drafts: IntArray, sampled: IntArray) -> int:
    """Return how many leading drafts equal the sampled tokens; `sampled` is longer."""
    wrong = np.flatnonzero(drafts != sampled[: len(drafts)]) if len(drafts) else drafts
    return int(wrong[0]) if len(wrong) else len(drafts)
