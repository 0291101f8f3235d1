"""From logits to tokens: greedy or drawn, for a whole batch at once.

The rules, in vLLM's order: logit_bias, min_tokens, the grammar, penalties, temperature, min_p, top_k, top_p.
What they leave is drawn from by one number of the request's own: number `i` of the stream that its seed
fixes (Philox) decides its token `i`, so nothing that runs beside it and no draft can change it.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from quire.engines.loop.drafts import num_accepted
from quire.engines.loop.guided import Grammars
from quire.engines.loop.params import SamplingParams
from quire.errors import ConfigError, QuireError

_BLOCK = 64
"""Random numbers that are made at once, four of each value of Philox's counter."""


class Logprob(NamedTuple):
    """The logarithm of a token's probability, and its rank: 1 is the likeliest."""

    logprob: float
    rank: int


class Sampled(NamedTuple):
    """What a step chose: `token_ids` int32, one of each key, or with drafts `counts` [keys] of each.

    `logprobs` has for each of them None, or a dict by token id: the token itself, then the likeliest.
    """

    token_ids: np.ndarray
    counts: np.ndarray | None
    logprobs: list[dict[int, Logprob] | None] | None

    def by_key(self) -> list[np.ndarray]:
        """Return the tokens of each key."""
        ends = np.cumsum(np.ones_like(self.token_ids) if self.counts is None else self.counts)
        return np.split(self.token_ids, ends[:-1])


class Sampler:
    """Chooses the tokens of many requests from rows of logits, `vocab_size` wide.

    A request is added under a key, before its first token. What it keeps: how many tokens it has, its
    random numbers, and where it asks for them its prompt, the counts of its tokens, its grammar. For
    greedy requests that ask for nothing it keeps nothing, and a step of these is one pass over the logits.

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
        self._tokenizer = tokenizer
        self._eos_ids = tuple(eos_ids)
        self._seeds = np.random.default_rng(seed)
        self._grammars: Grammars | None = None
        self._rows: dict[Hashable, _Row | None] = {}
        self._special: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, key: Hashable, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        """Take a request in. Raises `ConfigError` for parameters that this model cannot follow."""
        self._check_new(key)
        self._check_ids(params)
        asks = (params.logit_bias, params.min_tokens, params.guided, params.penalised)
        if params.greedy and not any(asks) and params.logprobs is None:
            self._rows[key] = None
            return
        seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
        row = _Row(params, seed % 2**64)
        if params.guided:
            if self._grammars is None:
                self._grammars = Grammars(self._tokenizer, self._vocab_size, self._eos_ids)
            row.matcher = self._grammars.open(params)
        if params.min_tokens:
            eos = () if params.ignore_eos else self._eos_ids
            row.banned = sorted({*eos, *(params.stop_token_ids or ())})
        if params.penalised:
            row.counts = np.zeros(self._vocab_size, np.int32)
            row.in_prompt = np.zeros(self._vocab_size, bool)
            row.in_prompt[np.asarray(prompt_ids, np.int64)] = True
        self._rows[key] = row
        self._special.add(key)

    def fork(self, key: Hashable, new_key: Hashable) -> None:
        """Take in another answer to the same prompt, with the tokens of `key` so far.

        The seed of fork number i of a request comes from the request's seed and i.
        """
        self._check_new(new_key)
        row = self._rows[key]
        self._rows[new_key] = None if row is None else row.fork()
        if row is not None:
            self._special.add(new_key)

    def remove(self, key: Hashable) -> None:
        """Forget a request."""
        del self._rows[key]
        self._special.discard(key)

    def sample(
        self, keys: Sequence[Hashable], logits: Tensor, drafts: Sequence[np.ndarray] | None = None
    ) -> Sampled:
        """Choose what comes next for each key, and take it as that request's next token.

        `logits` is [keys, vocab_size]: the row of each one's last token. With `drafts` (int32, of each key,
        empty where it has none) they are [keys + drafts, vocab_size]: of each key its last token's row, then
        one for each of its drafts. Chosen are then all drafts that would have been chosen without drafts,
        and the token after these. Raises `QuireError` for logits that are no numbers; nothing is taken then.
        """
        top, chosen = logits.max(dim=-1)
        if not bool(top.isfinite().all()):
            raise QuireError(
                "the model's logits are NaN or infinite; no token can be chosen from them"
            )
        places = self._places(keys, drafts)
        if places:
            picked = torch.tensor([place.at for place in places], device=logits.device)
            chosen[picked] = self._choose(places, logits[picked].float())
        tokens = chosen.to(torch.int32).cpu().numpy()
        counts = None
        told = _logprobs(places, logits, tokens)
        if drafts is not None:
            tokens, counts, told = _accepted(tokens, drafts, told)
        sampled = Sampled(tokens, counts, told)
        if places:
            for key, new in zip(keys, sampled.by_key(), strict=True):
                if (row := self._rows[key]) is not None:
                    row.take(new)
        return sampled

    def _check_new(self, key: Hashable) -> None:
        if key in self._rows:
            raise ConfigError(f"the sampler has a request {key!r} already; remove it first")

    def _check_ids(self, params: SamplingParams) -> None:
        size = self._vocab_size
        ids = [*(params.stop_token_ids or ()), *(params.logit_bias or ())]
        if ids and max(ids) >= size:
            raise ConfigError(
                f"token id {max(ids)} is none of this model's, which are below {size}"
            )
        if (params.logprobs or 0) > size:
            raise ConfigError(
                f"logprobs is {params.logprobs}, but the model has {size} tokens only"
            )
        if params.min_tokens and len({*ids, *self._eos_ids}) >= size:
            raise ConfigError("min_tokens leaves no token that may come: all are in stop_token_ids")

    def _places(
        self, keys: Sequence[Hashable], drafts: Sequence[np.ndarray] | None
    ) -> list["_Place"]:
        """Return the rows of logits that need more than the likeliest token."""
        if self._special.isdisjoint(keys):
            return []
        places: list[_Place] = []
        at = 0
        for key, ahead in zip(keys, drafts or [_NONE] * len(keys), strict=True):
            if (row := self._rows[key]) is not None:
                places += [_Place(at + j, row, ahead[:j]) for j in range(len(ahead) + 1)]
            at += len(ahead) + 1
        return places

    def _choose(self, places: list["_Place"], x: Tensor) -> Tensor:
        """Return the tokens of rows `x`, float32 [places, vocab_size], which is written over."""
        for i, (_, row, ahead) in enumerate(places):
            if row.params.logit_bias:
                x[i, [*row.params.logit_bias]] += _like(x, [*row.params.logit_bias.values()])
            if row.step + len(ahead) < row.params.min_tokens:
                x[i, row.banned] = -torch.inf
        guided = [i for i, place in enumerate(places) if place.row.matcher is not None]
        if guided and self._grammars is not None:
            allowed = [
                self._grammars.allowed(places[i].row.matcher, places[i].ahead) for i in guided
            ]
            x[guided] = x[guided].masked_fill(~_like(x, np.stack(allowed), torch.bool), -torch.inf)
        counted = [i for i, place in enumerate(places) if place.row.counts is not None]
        if counted:
            x[counted] = _penalised(x[counted], [places[i] for i in counted])
        chosen = x.argmax(dim=-1)
        drawn = [i for i, place in enumerate(places) if not place.row.params.greedy]
        if drawn:
            chosen[drawn] = _drawn(x[drawn], [places[i] for i in drawn])
        return chosen


_NONE = np.empty(0, np.int32)


class _Row:
    """What is kept of one request: `step` is the number of its tokens, and of its next random number."""

    def __init__(self, params: SamplingParams, seed: int) -> None:
        self.params = params
        self.seed = seed
        self.step = 0
        self.banned: list[int] = []
        self.counts: np.ndarray | None = None  # int32 [vocab_size], of the answer
        self.in_prompt: np.ndarray | None = None  # bool [vocab_size]
        self.matcher: Any = None
        self._num_forks = 0
        self._block = -1
        self._numbers = np.empty(0)

    def fork(self) -> "_Row":
        self._num_forks += 1
        seed = np.random.SeedSequence([self.seed, self._num_forks]).generate_state(1, np.uint64)
        new = _Row(self.params, int(seed[0]))
        new.step, new.banned, new.in_prompt = self.step, self.banned, self.in_prompt
        new.counts = None if self.counts is None else self.counts.copy()
        new.matcher = None if self.matcher is None else self.matcher.deep_copy()
        return new

    def take(self, tokens: np.ndarray) -> None:
        self.step += len(tokens)
        if self.counts is not None:
            np.add.at(self.counts, tokens, 1)
        if self.matcher is not None:
            self.matcher.consume_tokens(tokens.tolist())

    def number(self, step: int) -> float:
        """Return random number `step` of the request, from 0 to below 1."""
        block, at = divmod(step, _BLOCK)
        if block != self._block:
            source = np.random.Philox(key=self.seed, counter=block * _BLOCK // 4)
            self._numbers = (source.random_raw(_BLOCK) >> np.uint64(11)) * 2.0**-53
            self._block = block
        return float(self._numbers[at])


class _Place(NamedTuple):
    """A row of logits: where it is, whose, and the drafts between that one's last token and it."""

    at: int
    row: _Row
    ahead: np.ndarray


def _like(x: Tensor, values: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.as_tensor(values, dtype=dtype or x.dtype, device=x.device)


def _column(x: Tensor, places: list[_Place], name: str) -> Tensor:
    """Return a parameter of each place, [places, 1]."""
    return _like(x, [[getattr(place.row.params, name)] for place in places])


def _penalised(x: Tensor, places: list[_Place]) -> Tensor:
    counts = np.stack([cast("np.ndarray", place.row.counts) for place in places])
    for mine, place in zip(counts, places, strict=True):
        np.add.at(mine, place.ahead, 1)
    times = _like(x, counts)
    known = _like(
        x, np.stack([cast("np.ndarray", place.row.in_prompt) for place in places]), torch.bool
    )
    by = torch.where(known | (times > 0), _column(x, places, "repetition_penalty"), 1.0)
    x = torch.where(x > 0, x / by, x * by)
    x -= _column(x, places, "frequency_penalty") * times
    return x - _column(x, places, "presence_penalty") * (times > 0)


def _drawn(x: Tensor, places: list[_Place]) -> Tensor:
    """Return the tokens that the random numbers of these places draw."""
    x = x / _column(x, places, "temperature")
    for name, rule, off in (
        ("min_p", keep_min_p, 0),
        ("top_k", keep_top_k, 0),
        ("top_p", keep_top_p, 1),
    ):
        those = [i for i, place in enumerate(places) if getattr(place.row.params, name) != off]
        if those:
            x[those] = rule(x[those], _column(x, [places[i] for i in those], name))
    below = x.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    numbers = [[place.row.number(place.row.step + len(place.ahead))] for place in places]
    return torch.searchsorted(below, _like(below, numbers) * below[:, -1:], right=True)[:, 0]


def keep_min_p(x: Tensor, share: Tensor) -> Tensor:
    """Return logits [R, V] without tokens less likely than `share` [R, 1] times the likeliest."""
    return x.masked_fill(x < x.amax(dim=-1, keepdim=True) + share.log(), -torch.inf)


def keep_top_k(x: Tensor, k: Tensor) -> Tensor:
    """Return logits [R, V] without those below the k-th largest; k is [R, 1]."""
    k = k.long().clamp(max=x.shape[-1])
    largest = x.topk(int(k.max())).values
    return x.masked_fill(x < largest.gather(-1, k - 1), -torch.inf)


def keep_top_p(x: Tensor, share: Tensor, width: int = 1024) -> Tensor:
    """Return logits [R, V] without the tokens before which the likelier ones have the share [R, 1].

    Of the V tokens the likeliest `width` are put in order, and all only if these do not suffice.
    """
    width = min(width, x.shape[-1])
    largest = x.topk(width).values
    each = (largest - x.logsumexp(dim=-1, keepdim=True)).exp().double()
    kept = (each.cumsum(dim=-1) - each < share).sum(dim=-1, keepdim=True)
    if width < x.shape[-1] and bool((kept == width).any()):
        return keep_top_p(x, share, x.shape[-1])
    return x.masked_fill(x < largest.gather(-1, kept.clamp(min=1) - 1), -torch.inf)


def _accepted(
    tokens: np.ndarray, drafts: Sequence[np.ndarray], told: list[dict[int, Logprob] | None] | None
) -> tuple[np.ndarray, np.ndarray, list[dict[int, Logprob] | None] | None]:
    """Return tokens [keys + drafts] without those behind a wrong draft, how many of each key, and logprobs."""
    lengths = np.array([len(each) + 1 for each in drafts])
    starts = np.cumsum(lengths) - lengths
    counts = np.array(
        [num_accepted(each, tokens[start:]) + 1 for each, start in zip(drafts, starts, strict=True)]
    )
    kept = [
        at
        for start, count in zip(starts, counts, strict=True)
        for at in range(start, start + count)
    ]
    return tokens[kept], counts, None if told is None else [told[at] for at in kept]


def _logprobs(
    places: list[_Place], logits: Tensor, tokens: np.ndarray
) -> list[dict[int, Logprob] | None] | None:
    """Return for each row of logits what its request wants to be told; None if no one wants any."""
    those = [place for place in places if place.row.params.logprobs is not None]
    if not those:
        return None
    at = [place.at for place in those]
    x = logits[at].float().log_softmax(dim=-1)
    own = x.gather(-1, _like(x, tokens[at], torch.int64)[:, None])
    ranks = (x >= own).sum(dim=-1)
    best = x.topk(max(place.row.params.logprobs or 0 for place in those))
    told: list[dict[int, Logprob] | None] = [None] * len(tokens)
    rows = zip(those, *(part.cpu().numpy() for part in (own[:, 0], ranks, *best)), strict=True)
    for place, logprob, rank, values, ids in rows:
        mine = {int(tokens[place.at]): Logprob(float(logprob), int(rank))}
        for other in range(place.row.params.logprobs or 0):
            mine.setdefault(int(ids[other]), Logprob(float(values[other]), other + 1))
        told[place.at] = mine
    return told
