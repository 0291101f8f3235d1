"""Plain forwards of a model, of tokens at any position."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from quire.engines.models.cache_factory import make_layers
from quire.engines.models.column_tokens import TokenLedger
from quire.engines.models.working_cache import WorkingCache
from quire.tensors.kinds import LayerKind
from quire_passages import Masses, Segments, Variant
from quire_passages.company import related
from quire_passages.hf.capture import PassageKV, captured, grow, place
from quire_passages.variants import in_prompt

Ids = npt.NDArray[np.integer[Any]]


class Runs:
    """Plain forwards of a model over working caches of one row."""

    def __init__(self, model: Any, kinds: Sequence[LayerKind]) -> None:
        self.model = model
        self.kinds = kinds

    def past(self, num_tokens: int = 0) -> WorkingCache:
        """Return a working cache of one row without columns, with room for so many."""
        empty = torch.empty(1, 0, dtype=torch.long, device=self.model.device)
        ledger = TokenLedger(empty, np.zeros(1, np.int64))
        return WorkingCache(make_layers(self.kinds, room=num_tokens), ledger)

    def feed(self, past: WorkingCache, ids: Ids, first: int = 0) -> torch.Tensor:
        """Compute ids at positions from `first` on behind what `past` holds; return the last logits `[vocab]`."""
        return self.logits(past, ids, first, keep=1)[-1]

    def logits(self, past: WorkingCache, ids: Ids, first: int = 0, keep: int = 0) -> torch.Tensor:
        """Compute ids as `feed` does; return the logits `[rows, vocab]` of the last `keep`, of all with 0."""
        device = self.model.device
        fed = _row(ids, device)
        at = torch.arange(first, first + fed.shape[1], device=device)[None]
        seen = torch.ones(1, past.get_seq_length() + fed.shape[1], dtype=torch.long, device=device)
        with torch.no_grad():
            output = self.model(
                input_ids=fed,
                position_ids=at,
                attention_mask=seen,
                past_key_values=past,
                use_cache=True,
                logits_to_keep=keep,
            )
        past.ledger.append(fed)
        return output.logits[0]

    def hold(self, past: WorkingCache, ids: Ids) -> None:
        """Note that the columns behind those that are known hold exact K and V of `ids`."""
        past.ledger.append(_row(ids, self.model.device))

    def kv(self, ids: Ids, first: int) -> PassageKV:
        """Return K and V of ids as they are at positions from `first` on, with nothing before them."""
        past = self.past(len(ids))
        self.feed(past, ids, first)
        found = captured(past, 0, len(ids))
        assert found is not None
        return found

    def isolated(
        self, head: Ids, passages: Sequence[Ids], held: PassageKV | None = None
    ) -> list[Variant]:
        """Return variants of passages, each computed behind a head alone, whose own K and V are dropped.

        held  K and V of the head, where they are there already
        """
        past = self.past(len(head) + max((len(ids) for ids in passages), default=0))
        if held is not None:
            grow(past, held, len(head))
            place(past, held, 0, 0, [None] * len(self.kinds))
            self.hold(past, head)
        elif len(head):
            self.feed(past, head)
        before = np.asarray(head, np.int32).tobytes()
        found: list[Variant] = []
        for ids in passages:
            self.feed(past, ids, len(head))
            kv = captured(past, len(head), len(head) + len(ids))
            past.crop(-len(ids))
            assert kv is not None
            found.append(Variant(np.asarray(ids, np.int32).tobytes(), before, "isolated", kv))
        return found

    def among(self, alone: Sequence[Variant], count: int) -> Iterator[Variant]:
        """Yield a contextual variant of each passage of isolated ones, computed behind the most related others.

        FusionRAG, https://arxiv.org/abs/2601.12904, section 4.1. Passages are related whose mean V of the middle layer are.
        """
        vectors = np.stack([_mean_v(cast("PassageKV", each.kv)) for each in alone])
        head = np.frombuffer(alone[0].before, np.int32)
        passages = [np.frombuffer(each.ids, np.int32) for each in alone]
        for ids, company in zip(passages, related(vectors, count), strict=True):
            segments = Segments.of([head, *(passages[at] for at in company), ids, [0]])
            past = self.past(segments.num_tokens)
            self.feed(past, segments.tokens[: segments.spans[-1][1]])
            yield from contextual(past, segments, [len(company)])


def contextual(
    past: WorkingCache,
    segments: Segments,
    which: Iterable[int],
    masses: Sequence[Masses] | None = None,
) -> list[Variant]:
    """Return variants of some passages of a prompt whose exact K and V a working cache holds.

    A passage is left out where a windowed layer lacks some of it.
    """
    found: list[Variant] = []
    for index in which:
        kv = captured(past, *segments.spans[index])
        if kv is not None:
            found.append(in_prompt(segments, index, kv, None if masses is None else masses[index]))
    return found


def _mean_v(kv: PassageKV) -> npt.NDArray[np.float32]:
    """Return the mean V of a passage in the middle layer, which no position has turned: `[kv_heads x width]`."""
    v = kv.layers[len(kv.layers) // 2][1]
    return v.float().mean(1).flatten().numpy(force=True)


def _row(ids: Ids, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(np.asarray(ids, np.int64)).to(device)[None]
