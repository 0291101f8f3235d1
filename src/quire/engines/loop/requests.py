"""Requests as callers give them: prompts in several forms, and options."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, TypedDict, cast

import numpy as np

from quire.core import Hint, Scope
from quire.core.tokens import IntArray, array_of, key_of
from quire.engines.loop.params import SamplingParams
from quire.engines.segments import Segments
from quire.errors import ConfigError, TokensError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, its token ids, or one of them by name: {"prompt": ...}, {"prompt_token_ids": ...}.

{"segments": [head, passage, ..., question]}, token ids each, lets an engine with `passages` reuse passages; a list of ids
may have such `segments` as an attribute.
"""

SEEN = 60
"""Characters of a refused prompt that an error shows."""


class RequestOptions(TypedDict, total=False):
    """Options of a request beside its prompt and parameters.

    scope       who shares its prefixes
    priority    higher ones are served first, and preempted last
    deadline_s  seconds from now, after which it is given up
    max_wait_s  seconds from now, after which it is given up if it has not begun
    retain_s, store_until, hint  of `CacheManager.open`
    """

    scope: Scope | None
    priority: int
    deadline_s: float | None
    max_wait_s: float | None
    retain_s: float | None
    store_until: int | None
    hint: Hint


def job_terms(options: RequestOptions, now: float) -> dict[str, Any]:
    """Return the options of a request that a `Job` takes. Raises `ConfigError`."""
    known = RequestOptions.__annotations__
    if unknown := options.keys() - known.keys():
        raise ConfigError(
            f"{min(unknown)!r} is no option of a request; these are {', '.join(known)}"
        )
    terms: dict[str, Any] = {**options}
    deadline, start_by = (_end(name, terms, now) for name in ("deadline_s", "max_wait_s"))
    return {
        "scope": terms.pop("scope", None),
        "priority": terms.pop("priority", 0),
        "deadline": deadline,
        "start_by": inf if start_by is None else start_by,
        "terms": terms,
    }


def _end(name: str, terms: dict[str, Any], now: float) -> float | None:
    """Take an option of seconds from now out of others, and return it as a time."""
    if (seconds := terms.pop(name, None)) is None:
        return None
    if isinstance(seconds, int | float) and type(seconds) is not bool and 0 < seconds < inf:
        return now + seconds
    raise ConfigError(f"{name} is a finite number of seconds, above 0, got {seconds!r}")


def read_prompt(prompt: Prompt, tokenizer: Any) -> tuple[str | None, IntArray, Segments | None]:
    """Return the text of a prompt and its segments, where it has these, and its token ids between them.

    Raises `ConfigError`, and `TokensError` also for segments of another prompt.
    """
    if isinstance(prompt, Mapping):
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if (parts := prompt.get("segments")) is not None:
            segments = Segments.of(parts)
            return text, segments.tokens, segments
        if text is None and ids is None:
            raise ConfigError(f"a prompt has 'prompt' or 'prompt_token_ids', got {sorted(prompt)}")
        return text, *read_prompt(cast("str", text) if ids is None else ids, tokenizer)[1:]
    if isinstance(cast("object", prompt), int | float | None):
        raise TokensError(f"a prompt is a text, token ids, or a dict with either, got {prompt!r}")
    text, given = (
        (prompt, _encoded(prompt, tokenizer)) if isinstance(prompt, str) else (None, prompt)
    )
    tokens = array_of(key_of(given))
    if (parts := getattr(prompt, "segments", None)) is None:
        return text, tokens, None
    segments = Segments.of(cast("Iterable[Any]", parts))
    if not np.array_equal(segments.tokens, tokens):
        raise TokensError(
            f"segments of {segments.num_tokens} tokens are no parts of a prompt of {tokens.size}"
        )
    return text, tokens, segments


def most_tokens(
    tokens: IntArray, max_tokens: int | None, vocab_size: int, max_model_len: int
) -> int:
    """Return the most tokens of an answer to a prompt, None: as many as there is room for.

    Raises `TokensError` for tokens unknown to the model, or too many to leave room for an answer.
    """
    if (highest := int(tokens.max(initial=0))) >= vocab_size:
        raise TokensError(
            f"token id {highest} is none of this model's, which are below {vocab_size}"
        )
    room = max_model_len - tokens.size
    most = room if max_tokens is None else min(max_tokens, room)
    if room < 0 or (not most and max_tokens != 0):
        raise TokensError(
            f"the prompt has {tokens.size} tokens, and with an answer it may have {max_model_len} "
            "(max_model_len); shorten it"
        )
    return most


def _encoded(text: str, tokenizer: Any) -> Sequence[int]:
    if tokenizer is None:
        raise ConfigError(
            "a prompt in text needs a tokenizer: Engine(model, tokenizer), or give token ids"
        )
    try:
        return tokenizer(text)["input_ids"]
    except (TypeError, UnicodeError) as error:  # a lone surrogate, for instance
        raise TokensError(f"the tokenizer cannot read {text[:SEEN]!r}: {error}") from None


def with_params(
    prompts: Prompt | Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams]]:
    """Return each prompt with its parameters, which are one for all or one for each. Raises `ConfigError`."""
    asked = each_prompt(prompts)
    given = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(asked)
    if len(given) != len(asked):
        raise ConfigError(
            f"{len(given)} params for {len(asked)} prompts; give one for each, or one for all"
        )
    return [*zip(asked, given, strict=True)]


def each_prompt(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Return prompts as a list, also where one was given by itself. Raises `ConfigError`."""
    if isinstance(prompts, str | bytes | Mapping):
        return [cast("Prompt", prompts)]
    try:
        given = list(cast("Iterable[Any]", prompts))
    except TypeError:
        raise ConfigError(
            "prompts are a text, token ids, or several of these, got "
            f"{type(prompts).__name__} {repr(prompts)[:SEEN]}"
        ) from None
    first: Any = given[0] if given else ""
    if isinstance(first, str | Mapping | list | tuple) or np.ndim(first):
        return given
    return [cast("Prompt", prompts if hasattr(prompts, "__len__") else given)]
