"""Prompts as callers give them: texts, token ids, one or many."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from quire.core.tokens import array_of, key_of
from quire.errors import ConfigError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, its token ids, or one of them by name: {"prompt": ...}, {"prompt_token_ids": ...}."""


def read_prompt(prompt: Prompt, tokenizer: Any) -> tuple[str | None, list[int]]:
    """Return the text of a prompt, if it is one, and its token ids. Raises `ConfigError`, `TokensError`."""
    if isinstance(prompt, Mapping):
        text: Any = prompt.get("prompt")
        ids = prompt.get("prompt_token_ids")
        if text is None and ids is None:
            raise ConfigError(f"a prompt has 'prompt' or 'prompt_token_ids', got {sorted(prompt)}")
        return text, read_prompt(cast("str", text) if ids is None else ids, tokenizer)[1]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ConfigError(
                "a prompt in text needs a tokenizer: Engine(model, tokenizer), or give token ids"
            )
        return prompt, list(tokenizer(prompt)["input_ids"])
    return None, array_of(key_of(prompt)).tolist()


def each_prompt(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return prompts as a list, also where one was given by itself."""
    single = isinstance(prompts, str | Mapping) or (
        len(prompts) > 0 and isinstance(prompts[0], int | np.integer)
    )
    return [cast("Prompt", prompts)] if single else list(cast("Sequence[Prompt]", prompts))
