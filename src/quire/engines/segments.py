"""Segments: a prompt as a head, passages and a question, each in token ids of its own."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from quire.errors import TokensError

Tokens: TypeAlias = npt.NDArray[np.int32]
Given: TypeAlias = "Sequence[int] | npt.NDArray[Any]"


@dataclass(frozen=True)
class Segments:
    """A prompt in parts: `head` (a system prompt, may be empty), `passages`, `question`, int32 ids each.

    The prompt is their ids one behind the other. Text is never tokenized across a joint, where other
    tokens might come out: whoever has texts tokenizes each part by itself, with what stands between
    two passages in one of them.
    """

    head: Tokens
    passages: tuple[Tokens, ...]
    question: Tokens

    @classmethod
    def of(cls, parts: Iterable[Given]) -> "Segments":
        """Read `[head, passage, ..., question]`: ids as lists, arrays or tensors on the host.

        Raises `TokensError` for fewer than two parts, an empty passage or question, and what are no ids.
        """
        given = list(parts)
        if len(given) < 2:
            raise TokensError(
                f"segments have {len(given)} parts; give [head, passage, ..., question] as token ids each "
                "(a head may be empty)"
            )
        last = len(given) - 1
        names = ["the head", *(f"passage {i}" for i in range(1, last)), "the question"]
        read = [_ids(part, name) for part, name in zip(given, names, strict=True)]
        for ids, name in zip(read[1:], names[1:], strict=True):
            if not ids.size:
                raise TokensError(
                    f"{name} of {last + 1} segments is empty; leave it out, or give its token ids"
                )
        return cls(read[0], tuple(read[1:-1]), read[-1])

    @cached_property
    def tokens(self) -> Tokens:
        """The ids of the whole prompt."""
        return np.concatenate([self.head, *self.passages, self.question])

    @cached_property
    def text(self) -> bytes:
        """The ids of the whole prompt as bytes, four for each."""
        return self.tokens.tobytes()

    @cached_property
    def passage_texts(self) -> tuple[bytes, ...]:
        """The ids of each passage as bytes."""
        return tuple(ids.tobytes() for ids in self.passages)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The first position of each passage and the one behind its last."""
        return tuple(pairwise(accumulate([self.head.size, *(ids.size for ids in self.passages)])))

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return (self.spans[-1][1] if self.spans else self.head.size) + self.question.size


def _ids(given: object, name: str) -> Tokens:
    """Return ids as int32 `[n]`. Raises `TokensError` for what are none."""
    if isinstance(given, str | bytes):
        raise TokensError(
            f"{name} is text; give its token ids, as tokenizer(text).input_ids has them"
        )
    try:
        ids = np.asarray(cast("Any", given))
    except (ValueError, TypeError):  # parts of several lengths
        ids = np.asarray(None)
    if ids.size == 0 and ids.ndim == 1:
        return np.empty(0, np.int32)
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TokensError(
            f"{name} is a {type(given).__name__} that is no one-dimensional list of token ids"
        )
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise TokensError(
            f"{name} has token id {int(ids.min() if ids.min() < 0 else ids.max())}; ids are from 0 to 2**31 - 1"
        )
    return ids.astype(np.int32)
