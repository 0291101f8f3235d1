"""From logits to tokens, greedy or drawn, for a whole batch at once.

In vLLM's order: logit_bias, min_tokens, the grammar, penalties, temperature, min_p, top_k, top_p. What these
leave is drawn from with one number: number i of the stream (Philox) that the request's seed fixes decides its
token i. So nothing that runs beside it and no draft can change an answer.
"""

import copy
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.engines.loop.drafts import num_accepted
from quire.engines.loop.guided import Grammars
from quire.engines.loop.params import SamplingParams
from quire.errors import ConfigError, QuireError

_BLOCK = 64  # random numbers that are made at once, four for each value of Philox's counter


class Logprob(NamedTuple):
    """The logarithm of a token's probability, and its rank; 1 is the likeliest."""

    logprob: float
    rank: int


class Sampled(NamedTuple):
    """What a step chose: `token_ids` int32, one for each key, or with drafts `counts` [keys] for each.

    `logprobs` has for each token None, or a dict by token id: the token itself, then the likeliest.
    """

    token_ids: np.ndarray
    counts: np.ndarray | None
    logprobs: list[dict[int, Logprob] | None] | None

    def by_key(self) -> list[np.ndarray]:
        """Return the tokens of each key."""
        counts = np.ones_like(self.token_ids) if self.counts is None else self.counts
        return np.split(self.token_ids, counts.cumsum()[:-1])


class Sampler:
    """Chooses the tokens of requests, each added under a key, from rows of logits, `vocab_size` wide.

    Of greedy requests that ask for nothing else it keeps nothing, and a step of these is one pass over the
    logits. `tokenizer` and `eos_ids` are the model's; `seed` fixes the seeds of requests that have none.
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
        self._grammars = Grammars(tokenizer, vocab_size, self._eos_ids)
        self._seeds = np.random.default_rng(seed)
        self._rows: dict[Hashable, _Row | None] = {}
        self._special: set[Hashable] = set()  # those that have a row

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, key: Hashable, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        """Take a request in. Raises `ConfigError` for parameters that this model cannot follow."""
        size, eos = self._vocab_size, () if params.ignore_eos else self._eos_ids
        stops = {*eos, *(params.stop_token_ids or ())}
        if (most := max(*stops, *(params.logit_bias or ()), 0, 0)) >= size:
            raise ConfigError(f"token id {most} is none of this model's, which are below {size}")
        if (params.logprobs or 0) > size:
            raise ConfigError(f"logprobs is {params.logprobs}; this model has {size} tokens only")
        if params.min_tokens and len(stops) == size:
            raise ConfigError("min_tokens leaves no token that may come: all are in stop_token_ids")
        row = None
        if not params.plain:
            seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
            row = _Row(params, seed % 2**64, sorted(stops))
            if params.guided:
                row.matcher = self._grammars.open(params)
            if params.penalised:
                row.counts = np.zeros(size, np.int32)
                row.known = np.bincount(np.asarray(prompt_ids, np.int64), minlength=size) > 0
        self._put(key, row)

    def fork(self, key: Hashable, new_key: Hashable) -> None:
        """Take in another answer to the prompt of `key`, with its tokens so far and a seed made from its own."""
        row = self._rows[key]
        self._put(new_key, row and row.fork())

    def remove(self, key: Hashable) -> None:
        """Forget a request."""
        del self._rows[key]
        self._special.discard(key)

    def sample(
        self, keys: Sequence[Hashable], logits: Tensor, drafts: Sequence[np.ndarray] | None = None
    ) -> Sampled:
        """Choose what comes next for each key, and take it as that request's next token.

        `logits` [keys, vocab_size] are those of each one's last token. With `drafts` (int32, for each key) a row
        for each of a key's drafts follows that of its last token; chosen are all drafts that would be chosen
        without drafts, and one token more. Raises `QuireError` for NaN and infinite logits, and takes nothing.
        """
        top, chosen = logits.max(dim=-1)
        if not bool(top.isfinite().all()):
            raise QuireError("the model's logits are NaN or infinite: no token can be chosen")
        places = self._places(keys, drafts)
        if places:
            at = torch.tensor([place.at for place in places], device=logits.device)
            chosen[at] = self._chosen(places, logits[at].float())
        tokens = chosen.to(torch.int32).cpu().numpy()
        sampled = Sampled(tokens, None, _logprobs(places, logits, tokens))
        if drafts is not None:
            sampled = _accepted(sampled, drafts)
        if places:
            for key, new in zip(keys, sampled.by_key(), strict=True):
                if (row := self._rows[key]) is not None:
                    row.take(new)
        return sampled

    def _put(self, key: Hashable, row: "_Row | None") -> None:
        if key in self._rows:
            raise ConfigError(f"the sampler has a request {key!r} already; remove it first")
        self._rows[key] = row
        if row is not None:
            self._special.add(key)

    def _places(
        self, keys: Sequence[Hashable], drafts: Sequence[np.ndarray] | None
    ) -> list["_Place"]:
        """Return the rows of logits that need more than the likeliest token."""
        places: list[_Place] = []
        if not self._special.isdisjoint(keys):
            at = 0
            for key, ahead in zip(keys, drafts or [np.empty(0, np.int32)] * len(keys), strict=True):
                if (row := self._rows[key]) is not None:
                    places += [_Place(at + j, row, ahead[:j]) for j in range(len(ahead) + 1)]
                at += len(ahead) + 1
        return places

    def _chosen(self, places: list["_Place"], x: Tensor) -> Tensor:
        """Return the tokens of places from their logits, float32, which are written over."""
        for mine, (_, row, ahead) in zip(x, places, strict=True):
            if bias := row.params.logit_bias:
                mine[list(bias)] += _like(x, list(bias.values()))
            if row.step + len(ahead) < row.params.min_tokens:
                mine[row.stops] = -torch.inf
            if row.matcher is not None:
                allowed = self._grammars.allowed(row.matcher, ahead)
                mine[~_like(x, allowed, torch.bool)] = -torch.inf
        those = [i for i, place in enumerate(places) if place.row.params.penalised]
        if those:
            x[those] = _penalised(x[those], [places[i] for i in those])
        chosen = x.argmax(dim=-1)
        those = [i for i, place in enumerate(places) if not place.row.params.greedy]
        if those:
            chosen[those] = _drawn(x[those], [places[i] for i in those])
        return chosen


class _Row:
    """What is kept of a request: `step` is the number of its tokens, and of its next random number."""

    def __init__(self, params: SamplingParams, seed: int, stops: list[int]) -> None:
        self.params = params
        self.stops = stops
        self.step = 0
        self.counts = np.empty(
            0, np.int32
        )  # of the answer's tokens, [vocab_size] where these matter
        self.known = np.empty(0, bool)  # whether the prompt has a token
        self.matcher: Any = None
        self.num_forks = 0
        self.seed = seed
        self.numbers = (-1, np.empty(0))  # a block of them

    def fork(self) -> "_Row":
        self.num_forks += 1
        seed = np.random.SeedSequence([self.seed, self.num_forks]).generate_state(1, np.uint64)
        new = copy.copy(self)
        new.seed, new.num_forks, new.numbers = int(seed[0]), 0, (-1, np.empty(0))
        new.counts = self.counts.copy()
        new.matcher = self.matcher and self.matcher.deep_copy()
        return new

    def take(self, tokens: np.ndarray) -> None:
        self.step += len(tokens)
        if self.params.penalised:
            np.add.at(self.counts, tokens, 1)
        if self.matcher is not None:
            self.matcher.consume_tokens(tokens.tolist())

    def number(self, step: int) -> float:
        """Return random number `step`, from 0 to below 1."""
        block, at = divmod(step, _BLOCK)
        if block != self.numbers[0]:
            source = np.random.Philox(key=self.seed, counter=block * _BLOCK // 4)
            self.numbers = block, (source.random_raw(_BLOCK) >> np.uint64(11)) * 2.0**-53
        return float(self.numbers[1][at])


class _Place(NamedTuple):
    """A row of logits: where, whose, and the drafts between that one's last token and it."""

    at: int
    row: _Row
    ahead: np.ndarray


def _like(x: Tensor, values: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.as_tensor(values, dtype=dtype or x.dtype, device=x.device)


def _column(x: Tensor, places: list[_Place], name: str) -> Tensor:
    """Return a parameter of each place, [places, 1]."""
    return _like(x, [[getattr(place.row.params, name)] for place in places])


def _penalised(x: Tensor, places: list[_Place]) -> Tensor:
    counts = np.stack([place.row.counts for place in places])
    for mine, place in zip(counts, places, strict=True):
        np.add.at(mine, place.ahead, 1)
    times, known = _like(x, counts), _like(x, np.stack([place.row.known for place in places]))
    by = torch.where(times + known > 0, _column(x, places, "repetition_penalty"), 1.0)
    x = torch.where(x > 0, x / by, x * by) - _column(x, places, "frequency_penalty") * times
    return x - _column(x, places, "presence_penalty") * (times > 0)


def _drawn(x: Tensor, places: list[_Place]) -> Tensor:
    """Return the tokens that the random numbers of these places draw."""
    x = x / _column(x, places, "temperature")
    those = [i for i, place in enumerate(places) if place.row.params.narrow]
    if those:
        narrow = [places[i] for i in those]
        min_p, top_k, top_p = (_column(x, narrow, name) for name in ("min_p", "top_k", "top_p"))
        x[those] = kept(x[those], min_p, top_k, top_p)
    below = x.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    numbers = [[place.row.number(place.row.step + len(place.ahead))] for place in places]
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
    num = (shares.cumsum(dim=-1) - shares < top_p).sum(dim=-1, keepdim=True)
    short = (top_k < size) & (top_k > width) | (top_p < 1) & (num == width)
    if width < size and bool(short.any()):
        return kept(x, min_p, top_k, top_p, size)
    return left.masked_fill((left < largest.gather(-1, num - 1)) & (top_p < 1), -torch.inf)


def _accepted(sampled: Sampled, drafts: Sequence[np.ndarray]) -> Sampled:
    """Return of what was sampled for each last token and draft what stands behind no wrong draft."""
    tokens, _, told = sampled
    counts: list[int] = []
    right: list[int] = []
    start = 0
    for ahead in drafts:
        counts.append(num_accepted(ahead, tokens[start:]) + 1)
        right += range(start, start + counts[-1])
        start += len(ahead) + 1
    return Sampled(tokens[right], np.array(counts), told and [told[at] for at in right])


def _logprobs(
    places: list[_Place], logits: Tensor, tokens: np.ndarray
) -> list[dict[int, Logprob] | None] | None:
    """Return for each row of logits what its request wants to be told; None if none wants anything."""
    those = [place for place in places if place.row.params.num_logprobs is not None]
    if not those:
        return None
    at = [place.at for place in those]
    x = logits[at].float().log_softmax(dim=-1)
    own = x.gather(-1, _like(x, tokens[at, None], torch.int64))
    best = x.topk(max(place.row.params.num_logprobs or 0 for place in those))
    columns = [part.cpu().numpy() for part in (own[:, 0], (x >= own).sum(dim=-1), *best)]
    told: list[dict[int, Logprob] | None] = [None] * len(tokens)
    for place, logprob, rank, values, ids in zip(those, *columns, strict=True):
        mine = told[place.at] = {int(tokens[place.at]): Logprob(float(logprob), int(rank))}
        for i in range(place.row.params.num_logprobs or 0):
            mine.setdefault(int(ids[i]), Logprob(float(values[i]), i + 1))
    return told
